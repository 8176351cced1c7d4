"""One rank of tests/python/test_join.py: `join_ranks.py STAGE`. Each rank has another number of batches, one of them none."""

import sys

import torch

import reef

BATCHES = [[3, 1, 0], [0, 2, 3], [2, 2, 2], [1, 0, 0]]
"""Of each rank, in the rows that are tried one after another."""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down = torch.nn.Linear(24, 101), torch.nn.LayerNorm(101), torch.nn.Linear(101, 24)
        self.scale = torch.nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(self.norm(self.up(x)))
        if x[0, 0] > 0:  # not in every batch
            h = h * self.scale
        return h.pow(2).mean()


def batch(rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * rank + step))
    x[0, 0] = 1.0 if (rank + step) % 2 else -1.0
    return x


def make(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def alone(counts: list[int], norm: float | None) -> Net:
    net = Net()
    optimizer = make(net.parameters())
    for step in range(max(counts)):
        optimizer.zero_grad()
        for rank, count in enumerate(counts):
            if step < count:
                net(batch(rank, step)).backward()
        for p in net.parameters():
            if p.grad is not None:
                p.grad.div_(len(counts))
        if norm:
            reef.clip_grad_norm_(net.parameters(), norm)
        optimizer.step()
    return net


def train(group, stage: int, counts: list[int], norm: float | None, **options) -> dict[str, torch.Tensor]:
    net = Net()
    sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB", **options)
    optimizer = make(sharded.parameters())
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if norm:
            reef.clip_grad_norm_(sharded.parameters(), norm, group)
        optimizer.step()

    for number in range(counts[group.rank()]):
        optimizer.zero_grad()
        net(batch(group.rank(), number)).backward()
        step()
    sharded.join(step)
    assert steps == max(counts), f"{steps} steps, not {max(counts)}"
    found = {name: tensor.clone() for name, tensor in sharded.full_state_dict().items()}
    sharded.end()
    return found


def joined(group, stage: int) -> None:
    for counts in BATCHES:
        counts = counts[-group.size():] if group.size() < len(counts) else counts
        if max(counts) == 0:
            continue
        for norm in (None, 0.05):
            for options in ({}, {"offload": True}):
                expected = alone(counts, norm)
                found = train(group, stage, counts, norm, **options)
                for name, p in expected.named_parameters():
                    assert torch.equal(found[name], p), f"{name}, stage {stage}, {counts}, norm {norm}, {options}"


def trains_on(group, stage: int) -> None:
    """An epoch after another, masters, and a step that fails where others can be told."""
    net = Net()
    sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB", mixed_precision=torch.bfloat16)
    optimizer = make(sharded.parameters())
    for epoch in range(2):
        for number in range(1 + (group.rank() + epoch) % 2):
            optimizer.zero_grad()
            net(batch(group.rank(), number).bfloat16()).backward()
            optimizer.step()
        sharded.join(optimizer.step)
        told = [p.detach().double().sum() for p in sharded.full_state_dict().values()]
        mean = [value.clone() for value in told]
        reef.all_reduce(mean, group, reduction="mean")
        assert all(torch.equal(a, b) for a, b in zip(told, mean, strict=True)), f"epoch {epoch}: ranks have drifted apart"
    with sharded.no_sync():
        try:
            sharded.join(optimizer.step)
        except ValueError as error:
            assert "no_sync" in str(error)
        else:
            raise AssertionError("join in no_sync was not refused")
    sharded.end()


def abandoned(group, stage: int) -> None:
    """A pass of another rank that fails is passed over."""
    net = Net()
    sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB")
    optimizer = make(sharded.parameters())
    if group.rank() == 0:
        for number in range(3):
            optimizer.zero_grad()
            loss = net(batch(0, number))
            if number == 1:
                loss.register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError("this batch is too large")))
            try:
                loss.backward()
            except RuntimeError as error:
                assert number == 1 and "too large" in str(error), error
                continue
            optimizer.step()
    sharded.join(optimizer.step)
    expected = Net()
    of_alone = make(expected.parameters())
    for number in (0, 2):
        of_alone.zero_grad()
        expected(batch(0, number)).backward()
        for p in expected.parameters():
            if p.grad is not None:
                p.grad.div_(group.size())
        of_alone.step()
    found = sharded.full_state_dict()
    for name, p in expected.named_parameters():
        assert torch.equal(found[name], p), f"{name}, stage {stage}"
    sharded.end()


def main() -> None:
    stage = int(sys.argv[1])
    group = reef.init_process_group(timeout_seconds=1500.0)
    joined(group, stage)
    trains_on(group, stage)
    abandoned(group, stage)
    print("done", flush=True)


main()
