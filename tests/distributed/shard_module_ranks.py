"""One rank of tests/python/test_shard_module.py: what becomes of a module that changes after reef.shard, of ranks that do not
compute alike, and of what a program asks about parts. Every row at every stage: as one process that accumulates over all ranks'
batches, or an error on every rank."""

import contextlib
import copy

import torch

import reef

GROUP = reef.init_process_group(timeout_seconds=120)
RANK, RANKS = GROUP.rank(), GROUP.size()
ROWS = []


def row(function):
    ROWS.append(function)
    return function


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = (torch.nn.Linear(48, 48) for _ in range(3))
        self.register_buffer("average", torch.zeros(48))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        self.average = self.average * 0.5 + h.detach().mean(0)  # another tensor each time
        return self.third(torch.tanh(self.second(h)))


def batch(rank: int, step: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * rank + step)).to(dtype)


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Both:
    """A module under reef.shard, and alone in this process."""

    def __init__(self, stage: int, **options) -> None:
        self.net, self.alone = Net(), Net()
        self.sharded = reef.shard(self.net, GROUP, stage=stage, bucket_bytes=9000, **options)
        self.optimizer, self.of_alone = sgd(self.sharded.parameters()), sgd(self.alone.parameters())

    def steps(self, *numbers: int, dtype=torch.float32) -> None:
        for number in numbers:
            self.optimizer.zero_grad()
            self.net(batch(RANK, number, dtype)).pow(2).mean().backward()
            self.optimizer.step()
            self.of_alone.zero_grad()
            for rank in range(RANKS):
                self.alone(batch(rank, number, dtype)).pow(2).mean().backward()
            for p in self.alone.parameters():
                if p.grad is not None:
                    p.grad.div_(RANKS)
            self.of_alone.step()

    def check(self) -> None:
        found = self.sharded.full_state_dict()
        for name, expected in self.alone.named_parameters():
            assert torch.equal(found[name], expected), (name, (found[name] - expected).abs().max(), found[name].dtype, expected.dtype)
        with torch.no_grad():
            for (name, p), (_, expected) in zip(self.net.named_parameters(), self.alone.named_parameters(), strict=True):
                assert torch.equal(p.clone(), expected), name


@contextlib.contextmanager
def refused(text: str):
    """The same error on every rank."""
    said = ""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        said = str(error)
    assert text in said, f"{said!r} does not have {text!r}"


# ---- the module changes


@row
def a_buffer_that_is_assigned_is_the_ranks(stage):
    for how in ("local", "broadcast", "mean"):
        both = Both(stage, buffers=how)
        both.steps(0, 1)
        given = [torch.zeros(48) for _ in range(RANKS)]
        GROUP.allgather([given], [both.net.average]).wait()
        assert (how == "local" and RANKS > 1) != all(torch.equal(given[0], one) for one in given), how
        assert torch.equal(both.sharded.sharded_state_dict()["average"], both.net.average)
        state = both.sharded.full_state_dict()
        assert torch.equal(state["average"], both.net.average)
        both.sharded.load_state_dict(state | {"average": torch.ones(48)})
        assert torch.equal(both.net.average, torch.ones(48))
        both.sharded.end()


@row
def another_dtype_is_told_and_taken_up(stage):
    both = Both(stage)
    both.steps(0)
    both.net.zero_grad()
    both.net.double()
    with refused("has been given other memory since reef::shard"):
        both.net(batch(RANK, 1, torch.float64)).pow(2).mean().backward()
    both.sharded.refresh()
    both.optimizer = sgd(both.sharded.parameters())
    both.alone.double()
    both.of_alone = sgd(both.alone.parameters())
    both.steps(2, 3, dtype=torch.float64)
    both.check()
    both.sharded.end()


def change(both, what) -> None:
    for net in (both.net, both.alone):
        torch.manual_seed(11)
        what(net)


CHANGES = {
    "replaced": (lambda net: setattr(net, "second", torch.nn.Linear(48, 48)), "is not one that it had"),
    "added": (lambda net: setattr(net, "third", torch.nn.Sequential(net.third, torch.nn.Linear(48, 48))), "is not one that"),
    "assigned": (lambda net: net.load_state_dict({k: v.detach().clone() for k, v in Net().state_dict().items()}, assign=True),
                 "is not one that it had"),
    "gone": (lambda net: setattr(net, "second", torch.nn.Identity()), "is not the module's any more"),
}


@row
def other_layers_are_told_and_taken_up(stage):
    for name, (what, text) in CHANGES.items():
        both = Both(stage)
        both.steps(0, 1)
        change(both, what)
        with refused(text):
            both.net(batch(RANK, 2)).pow(2).mean().backward()
            both.optimizer.step()  # of none of the parameters that it had: backward does not come to them
        with refused(text):
            both.sharded.full_state_dict()
        both.optimizer.zero_grad()
        kept = {id(p) for p in both.alone.parameters()}
        both.sharded.refresh(both.optimizer)
        # The optimizer of one process: what is gone has left, what is new begins.
        group = both.of_alone.param_groups[0]
        group["params"] = [p for p in group["params"] if id(p) in kept]
        for p in list(both.of_alone.state):
            if id(p) not in kept:
                del both.of_alone.state[p]
        for optimizer, parameters in ((both.of_alone, list(both.alone.parameters())),
                                      (both.optimizer, both.sharded.parameters())):
            known = {id(p) for p in optimizer.param_groups[0]["params"]}
            if new := [p for p in parameters if id(p) not in known]:
                optimizer.add_param_group({"params": new})
        both.steps(3, 4)
        both.check()
        both.sharded.end()
        assert reef.shard_of(both.net) is None, name


@row
def what_is_unfrozen_is_told_and_taken_up(stage):
    net, alone = Net(), Net()
    for module in (net, alone):
        module.first.requires_grad_(False)
    both = object.__new__(Both)
    both.net, both.alone = net, alone
    both.sharded = reef.shard(net, GROUP, stage=stage, bucket_bytes=9000)
    both.optimizer, both.of_alone = sgd(both.sharded.parameters()), sgd([p for p in alone.parameters() if p.requires_grad])
    both.steps(0, 1)
    for module in (net, alone):
        module.first.requires_grad_(True)
    with refused("requires a gradient and did not"):
        net(batch(RANK, 2)).pow(2).mean().backward()
    both.optimizer.zero_grad()
    both.sharded.refresh(both.optimizer)
    known = {id(p) for p in both.optimizer.param_groups[0]["params"]}
    both.optimizer.add_param_group({"params": [p for p in both.sharded.parameters() if id(p) not in known]})
    both.of_alone.add_param_group({"params": list(alone.first.parameters())})
    both.steps(3, 4)
    both.check()
    both.sharded.end()


@row
def masters_keep_their_bits(stage):
    net = Net()
    sharded = reef.shard(net, GROUP, stage=stage, bucket_bytes=9000, mixed_precision=torch.bfloat16)
    optimizer = sgd(sharded.parameters())
    net(batch(RANK, 0, torch.bfloat16)).pow(2).mean().backward()
    optimizer.step()
    before = sharded.full_state_dict()
    net.second = torch.nn.Linear(48, 48)
    sharded.refresh(optimizer)
    after = sharded.full_state_dict()
    for name in ("first.weight", "third.bias"):
        assert torch.equal(before[name], after[name]) and after[name].dtype == torch.float32, name
        assert not torch.equal(after[name], after[name].bfloat16().float()), name
    assert not torch.equal(before["second.weight"], after["second.weight"])
    sharded.end()


@row
def where_it_cannot_be_taken_up_it_is_told(stage):
    both = Both(stage)
    with both.sharded.no_sync(), refused("in no_sync: end that first"):
        both.sharded.refresh()
    both.steps(0)
    both.check()
    both.sharded.end()


# ---- ranks that do not compute alike


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        raise MemoryError("this rank is out of memory")


@row
def a_forward_pass_that_fails_costs_its_batch(stage):
    """What that rank gives to a step is its next batch; nobody waits for long."""
    both = Both(stage)
    both.steps(0)
    for number in (1, 2):
        if RANK == 0 and number == 1:
            try:
                Fails.apply(torch.tanh(both.net.first(batch(RANK, 50))))
            except MemoryError:
                both.optimizer.zero_grad()
        both.steps(number)
    both.check()
    both.sharded.end()


@row
def ranks_may_use_different_layers(stage):
    def net():
        torch.manual_seed(5)
        return torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(4))

    layers, alone = net(), net()
    sharded = reef.shard(layers, GROUP, stage=stage, bucket_bytes=9000)
    optimizer, of_alone = sgd(sharded.parameters()), sgd(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        of_alone.zero_grad()
        def loss(layers, rank, step=step):
            return layers[3](layers[(rank + step) % 3](batch(rank, step))).pow(2).mean()
        loss(layers, RANK).backward()
        for rank in range(RANKS):
            loss(alone, rank).backward()
        for p in alone.parameters():
            if p.grad is not None:
                p.grad.div_(RANKS)
        optimizer.step()
        of_alone.step()
    found = sharded.full_state_dict()
    assert all(torch.equal(found[name], p) for name, p in alone.named_parameters())
    sharded.end()


# ---- what a program asks about parts


@row
def the_norm_of_parts_is_refused(stage):
    both = Both(stage)
    both.net(batch(RANK, 0)).pow(2).mean().backward()
    parts = both.sharded.parameters()
    if stage == 0 or RANKS == 1:
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
    else:
        before = [p.grad.clone() for p in parts]
        with refused("take that of the whole gradient, by reef::clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(parts, 1e-3)
        assert all(torch.equal(p.grad, b) for p, b in zip(parts, before, strict=True))
        for take in (lambda: torch.stack([p.grad.norm() for p in parts]).norm(),
                     lambda: torch.nn.utils.clip_grad_norm_(parts, 1.0, foreach=False)):
            with refused("take that of the whole gradient, by reef::clip_grad_norm_"):
                take()
        assert all(torch.equal(p.grad, b) for p, b in zip(parts, before, strict=True))
        [p.grad.norm() for p in parts]  # the program's own business
        torch.stack([p.norm() for p in parts])
        torch.nn.utils.get_total_norm([torch.ones(3), torch.ones(2)])
    both.sharded.end()


@row
def a_step_after_the_modules_zero_grad_is_none(stage):
    both = Both(stage)
    both.steps(0)
    both.net(batch(RANK, 1)).pow(2).mean().backward()
    both.net.zero_grad()
    both.optimizer.step()
    both.check()
    both.sharded.end()


def main() -> None:
    torch.set_num_threads(1)
    for check in ROWS:
        for stage in range(4):
            try:
                check(stage)
            except BaseException:
                print(f"row {check.__name__}, stage {stage}", flush=True)
                raise
    print("done", flush=True)


if __name__ == "__main__":
    main()
