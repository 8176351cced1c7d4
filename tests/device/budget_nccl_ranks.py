"""One rank of test_budget_nccl.py, called with `GROUP SEED`. It trains inside a budget for its device while NCCL works on its
tensors asynchronously and the device lags. The results must be those of a budget with room for everything and of no delays."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from played_device import delays
from preloaded import end_at_once

import reef

MIB = 1 << 20
RANK = int(os.environ["RANK"])
DEVICE = f"cuda:{RANK}"


def generator():
    return torch.Generator().manual_seed(RANK)


def asynchronous(group, inside) -> list[torch.Tensor]:
    """Waits for sums over ranks long after it has started them, while other tensors need room."""
    draw = generator()
    kept = [torch.randint(-99, 99, (MIB,), generator=draw).float().to(DEVICE) for _ in range(8)]
    with inside(kept):
        for _ in range(3):
            works = [group.allreduce([t]) for t in kept[:4]]
            for t in kept[4:]:
                t.mul_(0.5).add_(1)
            for work in works:
                work.wait()
            for t in kept[:4]:
                t.mul_(0.25)
            gathered = torch.empty(2 * MIB, device=DEVICE)
            work = group._allgather_base(gathered, kept[5])
            kept[6].add_(kept[7])
            work.wait()
            kept[5].copy_(gathered[MIB:])
    return [t.cpu() for t in kept]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).to(DEVICE)


def take_steps(forward, optimizer):
    draw = generator()
    for _ in range(4):
        x = torch.randn(64, 512, generator=draw).to(DEVICE)
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        optimizer.step()


def in_parallel(group, inside) -> list[torch.Tensor]:
    """Trains with DistributedDataParallel, which starts its sums in the backward pass."""
    net = network()
    parallel = DistributedDataParallel(net, device_ids=[RANK], process_group=group, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with inside(net):
        take_steps(parallel, optimizer)
    return [p.detach().cpu() for p in net.parameters()]


def sharded(group, inside) -> list[torch.Tensor]:
    net = network()
    shard = reef.shard(net, group, stage="parameters", bucket_bytes="1MiB")
    optimizer = reef.optim.AdamW(shard.parameters(), lr=1e-3)
    with inside(net):
        take_steps(net, optimizer)
    return [t.cpu() for t in shard.full_state_dict().values()]


def main(kind: str, seed: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(RANK)
    if kind == "torch":
        dist.init_process_group("cpu:gloo,cuda:nccl")
        group = dist.group.WORLD
    else:
        group = reef.init_process_group()
    # DistributedDataParallel accepts only torch's groups.
    for train, part in ((asynchronous, 0.7), (in_parallel, 0.5), (sharded, 0.7))[:: 1 if kind == "torch" else 2]:
        budgets = []

        def inside(targets, size="1GiB", budgets=budgets):
            budgets.append(reef.budget(size, targets, device=DEVICE))
            return budgets[-1]

        expected = train(group, inside)
        size = int(budgets[0].use().peak_bytes * part)
        with delays(seed + RANK, kernel=100, copy=500, communication=3000):
            found = train(group, lambda targets, size=size, inside=inside: inside(targets, size))
        use = budgets[1].use()
        assert use.evictions > 0, f"{train.__name__}: {budgets[0].use()} {use}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), f"{train.__name__}: {i}"
        print(train.__name__, size, use.evictions, flush=True)
    if kind == "torch":
        dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    end_at_once()
