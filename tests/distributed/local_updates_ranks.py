"""One rank of tests/python/test_local_updates.py: `local_updates_ranks.py SCENE`."""

import io
import os
import signal
import sys

import torch
import torch.distributed as dist

import reef

STEPS = 11


class Net(torch.nn.Module):
    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down = torch.nn.Linear(24, 101), torch.nn.BatchNorm1d(101), torch.nn.Linear(101, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))).pow(2).mean()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * rank + step))


def inner(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def step(net: Net, parameters, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    net(batch(rank, number)).backward()
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()


@torch.no_grad()
def alone(ranks: int, local_steps: int) -> list[Net]:
    """All ranks' nets in one process, and DiLoCo's outer steps."""
    nets = [Net() for _ in range(ranks)]
    optimizers = [inner(net.parameters()) for net in nets]
    start = [p.clone() for p in nets[0].parameters()]
    momentum = [torch.zeros_like(s) for s in start]
    for number in range(1, STEPS + 1):
        for rank, net in enumerate(nets):
            with torch.enable_grad():
                step(net, list(net.parameters()), optimizers[rank], rank, number)
        if number % local_steps:
            continue
        for i, parameters in enumerate(zip(*(net.parameters() for net in nets), strict=True)):
            taken = [start[i] - p for p in parameters]
            mean = sum(taken[1:], start=taken[0]) / ranks
            momentum[i] = 0.9 * momentum[i] + mean
            start[i] = start[i] - 0.7 * (0.9 * momentum[i] + mean)
            for p in parameters:
                p.copy_(start[i])
    return nets


def same(found, expected, text: str) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), f"{text}: {name} is off by {(a - b).abs().max()}"


def trains(group) -> None:
    """Rounds are those of one process, and a checkpoint in the middle of one goes on to the same bits."""
    expected = alone(group.size(), 4)[group.rank()]
    checkpoint = io.BytesIO()
    for resumed in (False, True):
        net = Net(3 if group.rank() == 0 else 5)
        sharded = reef.shard(net, group, bucket_bytes="5KiB")
        optimizer = inner(sharded.parameters())
        updates = reef.LocalUpdates(sharded, local_steps=4)
        first = 0
        if resumed:
            checkpoint.seek(0)
            of_net, of_optimizer, of_updates = torch.load(checkpoint)
            sharded.load_state_dict(of_net)
            sharded.load_optimizer_state_dict(optimizer, of_optimizer)
            updates.load_state_dict(of_updates)
            first = updates.local_step
            assert first == 6, first
        for number in range(first + 1, STEPS + 1):
            step(net, sharded.parameters(), optimizer, group.rank(), number)
            updates.step()
            if number == 6 and not resumed:
                states = [sharded.sharded_state_dict(), sharded.sharded_optimizer_state_dict(optimizer), updates.state_dict()]
                torch.save(states, checkpoint)
        same(net, expected, f"resumed: {resumed}")
        assert sharded.sent_bytes == 0 and (updates.sent_bytes > 0) == (group.size() > 1)
        for wrong in ({}, {"method": 3}, updates.state_dict() if group.rank() else {**updates.state_dict(), "ranks": 77}):
            refused(lambda wrong=wrong: updates.load_state_dict(wrong))
        updates.close()
        refused(updates.step)
        sharded.end()


def refused(call) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError("was not refused")


def compressed(group) -> None:
    """Parts, overlap and a compression: ranks are alike after finish(), and buffers, too."""
    net = Net()
    sharded = reef.shard(net, group, buffers="mean")
    optimizer = inner(sharded.parameters())
    updates = reef.LocalUpdates(
        sharded, local_steps=5, parts=2, overlap_steps=2, mixing=0.5, compression=reef.Compression("gtopk", density=0.05)
    )
    for number in range(STEPS):
        step(net, sharded.parameters(), optimizer, group.rank(), number)
        updates.step()
    updates.finish()
    assert updates.local_step == 0
    for name, tensor in net.state_dict().items():
        first = tensor.clone()
        reef.broadcast([first], group)
        assert torch.equal(first, tensor), name
    updates.close()
    refused(lambda: reef.LocalUpdates(sharded, local_steps=2 + group.rank() if group.size() > 1 else 0))
    refused(lambda: reef.LocalUpdates(sharded, compression="gtopk", parts=51))
    sharded.end()


def told(call) -> None:
    """All ranks that wait are told, and so is the one that has gone another way, if it waits itself."""
    try:
        call()
    except dist.DistError as error:
        text = str(error).splitlines()[0]
        assert "outer step of part 0 after local step 4" in text and "on rank" in text, text
        return
    raise AssertionError("was not told")


def separate(group, goes_on) -> None:
    """The last rank takes three steps, and the others four."""
    net = Net()
    sharded = reef.shard(net, group)
    optimizer = inner(sharded.parameters())
    updates = reef.LocalUpdates(sharded, local_steps=2, overlap_steps=1)
    last = group.rank() == group.size() - 1

    def run() -> None:
        for number in range(4 - last):
            step(net, sharded.parameters(), optimizer, group.rank(), number)
            updates.step()
        if last:
            goes_on(sharded, updates)
        else:
            updates.finish()

    told(run)


def killed(group) -> None:
    net = Net()
    sharded = reef.shard(net, group)
    optimizer = inner(sharded.parameters())
    updates = reef.LocalUpdates(sharded, local_steps=3)
    last = group.size() - 1
    try:
        for number in range(6):
            step(net, sharded.parameters(), optimizer, group.rank(), number)
            if group.rank() == last and number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            before = [p.detach().clone() for p in net.parameters()]
            updates.step()
    except dist.DistBackendError as error:
        assert f"rank {last}" in str(error), error
        assert number == 5 and all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        return
    raise AssertionError("a rank is gone, and nobody was told")


def copies(group) -> None:
    """Two copies of two ranks, which divide parameters."""
    rank = group.rank()
    within = [reef.subgroup(group, [0, 1]), reef.subgroup(group, [2, 3])][rank // 2]
    between = [reef.subgroup(group, [0, 2]), reef.subgroup(group, [1, 3])][rank % 2]
    for stage in ("gradients", "parameters"):
        net = torch.nn.Sequential(torch.nn.Linear(24, 101), torch.nn.GELU(), torch.nn.Linear(101, 24))
        sharded = reef.shard(net, within, stage=stage, bucket_bytes="5KiB")
        optimizer = inner(sharded.parameters())
        updates = reef.LocalUpdates(sharded, local_steps=2, between_copies=between)
        for number in range(5):
            optimizer.zero_grad()
            net(batch(rank, number)).pow(2).mean().backward()
            reef.clip_grad_norm_(sharded.parameters(), 0.5, within)
            optimizer.step()
            updates.step()
        updates.finish()
        for name, tensor in sharded.full_state_dict().items():
            first = tensor.clone()
            reef.broadcast([first], group)
            assert torch.equal(first, tensor), f"{name}, stage {stage}"
        updates.close()
        sharded.end()


SCENES = {
    "trains": trains,
    "compressed": compressed,
    "killed": killed,
    "copies": copies,
    "finishes": lambda group: separate(group, lambda _, updates: updates.finish()),
    "saves": lambda group: separate(group, lambda sharded, _: sharded.full_state_dict()),
}


def main() -> None:
    group = reef.init_process_group(timeout_seconds=1500.0)
    SCENES[sys.argv[1]](group)
    print("done", flush=True)


main()
