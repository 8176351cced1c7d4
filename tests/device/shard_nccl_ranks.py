"""One rank of test_shard_nccl.py, called with `GROUP SEED`. It trains at every stage, once with parameters on a device of its own
over NCCL, and once on the CPU. All values are integers, so sums have the same bits in any order. If the seed is not 0, the
devices lag at random."""

import contextlib
import os
import sys

from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from played_device import delays
from preloaded import end_at_once
from whole_number_net import Net, gradients

import reef

STEPS = 4


def group_of(kind: str):
    if kind == "reef":
        return reef.init_process_group()
    dist.init_process_group("nccl" if kind == "nccl alone" else "cpu:gloo,cuda:nccl")
    return dist.group.WORLD


def trained(group, device: str, rank: int, delayed: bool = False, **options) -> dict[str, torch.Tensor]:
    net = Net().to(device)
    sharded = reef.shard(net, group, reduction="sum", bucket_bytes=2048, **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    if delayed:
        optimizer = reef.DelayedUpdate(optimizer, sharded)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = gradients(rank, step)
        torch.stack([(p * own[name].to(p.device)).sum() for name, p in net.named_parameters()]).sum().backward()
        optimizer.step()
    if delayed:
        optimizer.finish()
    state = {name: values.cpu() for name, values in sharded.full_state_dict().items()}
    sharded.end()
    return state


def compressions(kind: str) -> list[reef.Compression]:
    by_backend_of_device = [reef.Compression("bfloat16"), reef.Compression("float16")]
    if kind == "nccl alone":
        return by_backend_of_device
    return by_backend_of_device + [reef.Compression(name, density=0.1) for name in ("topk", "gtopk", "gtopk_tree", "oktopk")]


def main(kind: str, seed: int) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    group = group_of(kind)
    on_cpu = dist.new_group(backend="gloo") if kind == "nccl alone" else group
    rows = [{"stage": stage, "offload": offload} for stage in ("replicate", "optimizer", "gradients", "parameters")
            for offload in (False, True) if not (offload and stage == "replicate")]
    rows += [{"stage": "optimizer", "offload": True, "delayed": True}]
    if world_size == 2:
        rows += [{"stage": "optimizer", "shard_degree": 1}]  # Replicates over subgroups.
    rows += [{"stage": "parameters", "compression": method} for method in compressions(kind)]
    rows += [{"stage": "optimizer", "compression": method, "offload": True} for method in compressions(kind)[::2]]
    for row in rows:
        with delays(seed + rank, kernel=300, copy=300, communication=1000) if seed else contextlib.nullcontext():
            found = trained(group, f"cuda:{rank}", rank, **row)
        expected = trained(on_cpu, "cpu", rank, **row)
        for name, values in expected.items():
            assert torch.equal(found[name], values), f"{row}: {name}"
    print("done", flush=True)
    if kind != "reef":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    end_at_once()
