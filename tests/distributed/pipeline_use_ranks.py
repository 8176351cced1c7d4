"""One rank of tests/python/test_pipeline.py: `pipeline_use_ranks.py SCENE`. What programs do with pipelines besides training."""

import sys

import torch
from pipeline_ranks import chain, check_training, data, through
from torch import nn

import reef


class Statistics(nn.Module):
    """A buffer that is assigned anew, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        self.calls = self.calls + 1
        return self.layer(x)


def states():
    """What one shape saves, another loads; and a Shard, and one process."""
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()

    def net(seed):
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 5), nn.Tanh(), Statistics(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)]
        return nn.Sequential(*layers)

    shapes = [dict(schedule="1f1b"), dict(schedule="zbv", shard=dict(stage="optimizer"))]
    shapes += [dict(replicas=size, shard=dict(stage=stage)) for stage in ("replicate", "gradients", "parameters")]
    if size % 2 == 0:
        shapes += [dict(schedule="chimera", shard=dict(stage="parameters")), dict(ranks_per_chunk=[2] * (size // 2), shard=dict(stage="gradients"))]
    x, y = data(0)
    first = None
    for number, shape in enumerate(shapes):
        pipeline = reef.Pipeline(net(3), group, micro_batches=4, **shape)
        optimizer = reef.optim.AdamW8bit(pipeline.parameters(), lr=1e-2) if number == 1 else torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        for _ in range(2):
            pipeline.step(x, nn.functional.cross_entropy, y)
            optimizer.step()
            optimizer.zero_grad()
        model, own = pipeline.full_state_dict(), pipeline.full_optimizer_state_dict(optimizer)
        assert model.keys() == net(0).state_dict().keys()
        assert [name for group in own["param_groups"] for name in group["param_names"]] == [name for name, _ in net(0).named_parameters()]
        takes_half = shape.get("schedule") == "chimera" or "ranks_per_chunk" in shape  # of the micro-batches
        assert model["2.calls"] == (4 if takes_half else 8), (shape, model["2.calls"])
        other = dict(shapes[(number + 1) % len(shapes)])
        loaded = reef.Pipeline(net(4), group, micro_batches=2, **other)
        kind = type(optimizer)
        again = kind(loaded.parameters(), lr=1e-2)
        loaded.load_state_dict(model if rank == 0 else {})
        loaded.load_optimizer_state_dict(again, own)
        for name, value in loaded.full_state_dict().items():
            assert torch.equal(value, model[name]), (shape, other, name)
        now = loaded.full_optimizer_state_dict(again)
        assert str(now) == str(own), (shape, other)
        # One process, and a Shard.
        whole = net(5)
        whole.load_state_dict(model)
        alone_again = kind(whole.parameters(), lr=1e-2)
        alone_again.load_state_dict(own)
        module = net(6)
        sharded = reef.shard(module, group, stage="optimizer")
        of_shard = kind(sharded.parameters(), lr=1e-2)
        sharded.load_state_dict(model)
        sharded.load_optimizer_state_dict(of_shard, own)
        assert str(sharded.full_optimizer_state_dict(of_shard)) == str(own)
        # And what they save.
        back = reef.Pipeline(net(7), group, micro_batches=2, **shape)
        by_back = kind(back.parameters(), lr=1e-2)
        back.load_state_dict(whole.state_dict())
        back.load_optimizer_state_dict(by_back, alone_again.state_dict())
        assert str(back.full_optimizer_state_dict(by_back)) == str(own)
        # A step of each of them is the same.
        if shape.get("replicas", 1) == 1 and not takes_half:
            first = first or own
            back.step(x, nn.functional.cross_entropy, y)
            by_back.step()
            for xs, ys in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
                nn.functional.cross_entropy(whole(xs), ys).backward()
            for parameter in whole.parameters():
                parameter.grad.div_(2)
            alone_again.step()
            for name, value in back.full_state_dict().items():
                assert torch.equal(value, whole.state_dict()[name]), (shape, name)
    try:
        pipeline.load_state_dict({**model, "nobody": torch.zeros(1)} if rank == 0 else model)
    except ValueError as error:
        assert "nobody" in str(error), error
    else:
        raise AssertionError("an unknown name was loaded")
    pipeline = reef.Pipeline(net(1), group)
    try:
        torch.optim.LBFGS(pipeline.parameters()).step(lambda: torch.zeros(1))
    except ValueError as error:
        assert size > 1 and "LBFGS" in str(error), error
    else:
        assert size == 1


class Head(nn.Module):
    """The head of a language model, whose weight is the embedding's."""

    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return x @ self.weight.t()


def tied():
    """Found where modules are given, named where they are made; trained as one weight, and saved under both names."""
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()

    def net(seed=3):
        torch.manual_seed(seed)
        embedding = nn.Embedding(10, 6)
        return [embedding, nn.Linear(6, 6), nn.Tanh(), Head(embedding)]

    torch.manual_seed(1)
    tokens, targets = torch.randint(0, 10, (8,)), torch.randint(0, 10, (8,))
    expected = None
    for options in [{}, dict(schedule="gpipe"), dict(shard=dict(stage="optimizer")), dict(made=True)]:
        made = options.pop("made", False)
        modules = net(3 + rank) if made else net()
        stages = [lambda module=module: module for module in modules] if made else modules
        names = dict(tied=[["0.weight", "3.weight"]]) if made else {}
        pipeline = reef.Pipeline(stages, group, micro_batches=2, **options, **names)
        optimizer = torch.optim.AdamW([{"params": pipeline.parameters()}], lr=0.1)  # some rank may have none
        for _ in range(3):
            pipeline.step(tokens, nn.functional.cross_entropy, targets)
            optimizer.step()
            optimizer.zero_grad()
        assert len(pipeline.full_optimizer_state_dict(optimizer)["param_groups"][0]["param_names"]) == 3
        state = pipeline.full_state_dict()
        assert list(state) == ["0.weight", "1.weight", "1.bias", "3.weight"], list(state)
        assert torch.equal(state["0.weight"], state["3.weight"])
        nn.Sequential(*net()).load_state_dict(state)
        if made:
            continue  # the middle has begun otherwise on each rank
        expected = expected or state
        for name, value in state.items():
            assert torch.equal(value, expected[name]), (options, name)


def planned():
    """A profile is the same on all ranks, and its plan runs with the bits of any other."""
    group = reef.init_process_group()
    modules = chain()
    before = [p.detach().clone() for module in modules for p in module.parameters()]
    profile = reef.measure_pipeline(modules, data(0)[0] if group.rank() == 0 else None, group, repeats=1, rank_bytes="1GiB")
    for now, then in zip((p for module in modules for p in module.parameters()), before, strict=True):
        assert torch.equal(now, then) and now.grad is None
    assert len(profile.stages) == 8 and profile.rank_bytes == (1 << 30,) * group.size()
    assert [stage.output_bytes for stage in profile.stages[:2]] == [9 * 5 * 4] * 2
    counting = [nn.Linear(4, 5), *[Statistics() for _ in range(3)]]
    reef.measure_pipeline(counting, torch.ones(2, 4), group, repeats=1, each_link=False)
    assert all(int(stage.calls) == 0 for stage in counting[1:])  # which stages assign anew
    numbers = torch.tensor([stage.forward_seconds for stage in profile.stages], dtype=torch.float64)
    of_first = numbers.clone()
    reef.broadcast([of_first], group)
    assert torch.equal(numbers, of_first)
    plan = reef.plan_pipeline(profile, group.size(), 4)
    check_training(group, chain(), schedule=plan.schedule, cuts=plan.cuts)
    try:
        reef.measure_pipeline(modules, None, group, repeats=0)
    except ValueError as error:
        assert "0 repeats" in str(error)
    else:
        raise AssertionError("0 repeats were measured")


def together():
    """With what programs use besides: autocast, a scaled loss, states of 8 bits, a memory budget, learning rates that change."""
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()

    # Autocast: the bits of one process.
    for options in [{}, dict(recompute=True), dict(schedule="zero_bubble")]:
        modules, copies = chain(), chain()
        x, y = data(0)
        with torch.autocast("cpu", torch.bfloat16):
            for xs, ys in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
                nn.functional.cross_entropy(through(modules, xs), ys).backward()
            pipeline = reef.Pipeline(copies, group, micro_batches=4, **options)
            pipeline.step(x, nn.functional.cross_entropy, y)
        named = {f"{i}.{name}": p for i, module in enumerate(modules) for name, p in module.named_parameters()}
        for name, parameter in pipeline.named_parameters():
            assert torch.equal(parameter.grad, named[name].grad / 4), (options, name)

    # A scaled loss: what overflows on one rank leaves the step out on all.
    pipeline = reef.Pipeline(chain(), group, micro_batches=4)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    scaler = reef.GradScaler("cpu", init_scale=4.0, group=group)
    for overflows in (False, True, False):
        before = [parameter.detach().clone() for parameter in pipeline.parameters()]
        pipeline.step(data(0)[0], lambda output, y: scaler.scale(nn.functional.cross_entropy(output, y)), data(0)[1])
        if overflows and rank == size - 1:
            pipeline.parameters()[-1].grad[0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(now, then) for now, then in zip(pipeline.parameters(), before, strict=True)]
        assert any(changed) != overflows, (overflows, changed)

    # A budget that does not hold all that a rank has, states of 8 bits, and a learning rate that falls.
    def train(limit):
        torch.manual_seed(5)
        layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)] + [nn.Linear(128, 3)]
        if limit is None:
            return run_steps(layers)
        with reef.budget(limit) as budget:
            losses = run_steps(layers)
            assert budget.use().evictions > 0 and budget.peak_bytes <= reef.parse_bytes(limit), str(budget.use())
        return losses

    def run_steps(layers):
        pipeline = reef.Pipeline(layers, group, micro_batches=4, schedule="zero_bubble", hops=[2])
        optimizer = reef.optim.AdamW8bit(pipeline.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        losses = []
        for step in range(4):
            torch.manual_seed(step)
            x, y = torch.randn(64, 128), torch.randint(0, 3, (64,))
            losses.append(pipeline.step(x, nn.functional.cross_entropy, y).item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return losses

    unlimited, limited = train(None), train("1MiB" if size == 1 else "600KiB")
    assert limited == unlimited, (limited, unlimited)


class Attention(nn.Module):
    """Of one head, which keeps keys and values for each lane."""

    def __init__(self, lane):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.lane, self.cache = lane, {}

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        lane = self.lane()
        if lane in self.cache:
            k, v = torch.cat([self.cache[lane][0], k]), torch.cat([self.cache[lane][1], v])
        self.cache[lane] = k, v
        return x + self.out(torch.softmax(q @ k.t(), -1) @ v)


def generation():
    """Tokens of several lanes, one of which ends early, with keys and values in flight."""
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()

    def net(lane):
        torch.manual_seed(2)
        return [nn.Embedding(11, 8), Attention(lane), Attention(lane), Attention(lane), nn.Linear(8, 11)]

    def generated(run, lanes):
        tokens = {lane: [] for lane in range(lanes)}

        def following(lane, step, logits):
            tokens[lane].append(int(logits[-1].argmax()))
            return None if lane == 1 and step == 3 else torch.tensor(tokens[lane][-1:])

        run(following)
        return tokens

    for lanes in (1, 3, size + 1):
        now = [0]
        one = net(lambda: now[0])

        @torch.no_grad()
        def alone(following):
            for lane in range(lanes):
                now[0] = lane
                x = torch.tensor([lane + 1])
                for step in range(6):
                    x = following(lane, step, through(one, x))
                    if x is None:
                        break

        expected = generated(alone, lanes)
        pipeline = reef.Pipeline(net(reef.pipeline_micro_batch), group, micro_batches=lanes)
        starts = [torch.tensor([lane + 1]) for lane in range(lanes)] if rank == 0 else None
        found = generated(lambda following: pipeline.generate(starts, 6, following), lanes)
        assert found == (expected if rank == size - 1 else {lane: [] for lane in range(lanes)}), (found, expected)
    assert reef.pipeline_micro_batch() is None


def sampled():
    """A pipeline that measures and plans by itself trains as any other, and makes the model once."""
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()
    x, y = data(0)

    def layers():
        return [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Dropout(0.3), nn.Linear(5, 5), nn.Linear(5, 3)]

    def trained_by(stages, **options):
        pipeline = reef.Pipeline(stages, group, micro_batches=3, **options)
        optimizer = torch.optim.AdamW([{"params": pipeline.parameters()}], lr=1e-2)
        losses = []
        for _ in range(2):
            losses.append(pipeline.step(x, nn.functional.cross_entropy, y))
            optimizer.step()
            optimizer.zero_grad()
        return pipeline, losses

    torch.manual_seed(4)
    one, expected = trained_by(nn.Sequential(*layers()))
    sample = x[:3] if rank == 0 else torch.empty(0)
    replicas = [1, size] if size > 1 else [1]
    for options in [dict(sample=sample), dict(sample=sample, rank_bytes="1GiB", schedule="zero_bubble")]:
        torch.manual_seed(4)
        pipeline, losses = trained_by(nn.Sequential(*layers()), **options)
        assert all(map(torch.equal, losses, expected)), (losses, expected)
        assert pipeline.plan.startswith(f"{pipeline.schedule.name} of 3 micro-batches over {size} ranks: "), pipeline.plan
        assert pipeline.schedule.name == options.get("schedule", pipeline.schedule.name)
        assert not one.plan
        for name, value in pipeline.full_state_dict().items():
            assert torch.equal(value, one.full_state_dict()[name]), name
    # The plan may give a chunk to several ranks; then it has the bits of the same schedule without a plan.
    torch.manual_seed(4)
    pipeline, losses = trained_by(nn.Sequential(*layers()), sample=sample, may_replicate=True, sample_loss=lambda output: nn.functional.cross_entropy(output, y[:3]))
    torch.manual_seed(4)
    by_hand, expected = trained_by(nn.Sequential(*layers()), schedule=pipeline.schedule, cuts=pipeline.cuts)
    assert pipeline.plan and all(map(torch.equal, losses, expected)), (losses, expected)
    for name, value in pipeline.full_state_dict().items():
        assert torch.equal(value, by_hand.full_state_dict()[name]), name
    # An asynchronous schedule is planned by its name.
    pipeline = reef.Pipeline(nn.Sequential(*layers()), group, micro_batches=4, sample=sample, schedule="pipedream_2bw")
    optimizer = torch.optim.SGD([{"params": pipeline.parameters()}], lr=0.1)
    assert pipeline.plan.startswith("pipedream_2bw of 16 micro-batches over "), pipeline.plan  # four batches
    losses = pipeline.train([(x, y)] * 3, nn.functional.cross_entropy, optimizer.step)
    assert losses.shape == (3,) and losses.isfinite().all()
    # Makers run once more for what is measured, and the random numbers after that are what they would have been.
    draws = []
    for options in [dict(), dict(sample=sample)]:
        torch.manual_seed(6)
        pipeline = reef.Pipeline([(lambda: nn.Linear(4, 4)) for _ in range(size)], group, **options)
        draws.append([parameter.clone() for parameter in pipeline.parameters()])
    assert all(map(torch.equal, *draws))
    for count in replicas[1:]:
        torch.manual_seed(4)
        pipeline, _ = trained_by(nn.Sequential(*layers()), sample=sample, replicas=count)
        assert f"over {size // count} ranks" in pipeline.plan, pipeline.plan
    messages = []
    for options in [dict(sample=sample, cuts=[1]), dict(sample=sample, rank_bytes=100), dict(sample=sample, schedule="chimera"),
                    dict(sample=[sample] * (1 + (rank > 0)))]:  # fmt: skip
        try:
            reef.Pipeline(nn.Sequential(*layers()), group, micro_batches=3, **options)
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    assert "leave out the one or the others" in messages[0], messages
    assert "bytes are missing" in messages[1], messages
    assert "let the plan replicate" in messages[2], messages
    assert size == 1 or "different options" in messages[3], messages


def scaled():
    """Half precision and a scaled loss over replicas: the bits of one process, also where one replica overflows."""
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()
    micro_batches = 2

    def net(dtype):
        torch.manual_seed(8)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)).to(dtype)

    def batch(step, replica):
        torch.manual_seed(100 * step + replica)
        return torch.randn(4, 6), torch.randint(0, 3, (4,))

    def loss(scaler, step, replica):
        overflows = step == 1 and replica == size - 1
        return lambda output, y: scaler.scale(nn.functional.cross_entropy(output.float(), y) * (1e38 if overflows else 1))

    def trained_alone(dtype):
        one = net(dtype)
        optimizer, scaler = reef.optim.AdamW(one.parameters(), lr=1e-2), reef.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            sums = []
            for replica in range(size):
                x, y = batch(step, replica)
                for xs, ys in zip(x.to(dtype).tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True):
                    loss(scaler, step, replica)(one(xs), ys).backward()
                sums.append([parameter.grad for parameter in one.parameters()])
                optimizer.zero_grad()
            for parameter, *of_replicas in zip(one.parameters(), *sums, strict=True):
                parameter.grad = sum(of_replicas[1:], of_replicas[0]) / (size * micro_batches)
            scaler.unscale_(optimizer)
            reef.clip_grad_norm_(one.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return one.state_dict(), scaler.get_scale()

    for dtype in (torch.float32, torch.bfloat16):
        expected, scale = trained_alone(dtype)
        assert scale == 32.0, scale  # one step was left out
        for stage in ("replicate", "optimizer", "gradients", "parameters"):
            pipeline = reef.Pipeline(net(dtype), group, micro_batches=micro_batches, replicas=size, shard=dict(stage=stage))
            optimizer = reef.optim.AdamW([{"params": pipeline.parameters()}], lr=1e-2)
            scaler = reef.GradScaler("cpu", init_scale=64.0, group=group)
            for step in range(3):
                x, y = batch(step, rank)
                pipeline.step(x.to(dtype), loss(scaler, step, rank), y)
                scaler.unscale_(optimizer)
                pipeline.clip_grad_norm_(0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == scale, (dtype, stage, scaler.get_scale())
            for name, value in pipeline.full_state_dict().items():
                assert torch.equal(value, expected[name]), (dtype, stage, name)


if __name__ == "__main__":
    {"scaled": scaled, "states": states, "tied": tied, "planned": planned, "together": together, "generation": generation, "sampled": sampled}[sys.argv[1]]()
