"""One rank of test_shard_waits.py: `GROUP SEED` counts how often the program waits for its device in a step of each row. With a
seed the devices lag."""

import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from played_device import delays, host_waits
from preloaded import end_at_once

import reef

LAYERS, FEATURES = 8, 32
WARM_STEPS, STEPS = 2, 2
BUCKET_BYTES = {2: 21_000, 8: 6_000}
"""Sizes that divide the module into 2 and into 8 buckets."""
METHODS = ["topk", "gtopk", "gtopk_tree", "oktopk", "dgc"]
STAGES = ["replicate", "optimizer", "gradients", "parameters"]


def group_of(kind: str):
    if kind in ("alone", "reef"):
        return reef.init_process_group()
    dist.init_process_group("nccl" if kind == "nccl alone" else "cpu:gloo,cuda:nccl")
    return dist.group.WORLD


def counted(
    group, device: str, buckets: int, clips: bool = False, scales: bool = False, delayed: bool = False, **options
) -> list[int]:
    """Returns the waits of each measured step, after some steps in which allocators and orders are learned."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS))).to(device)
    x = torch.randn(16, FEATURES).to(device)
    sharded = reef.shard(net, group, bucket_bytes=BUCKET_BYTES[buckets], **options) if group else None
    optimizer = torch.optim.SGD((sharded or net).parameters(), lr=0.01)
    if delayed:
        optimizer = reef.DelayedUpdate(optimizer, sharded)
    scaler = reef.GradScaler(group=group) if scales else None
    waits = []
    for _ in range(WARM_STEPS + STEPS):
        before = host_waits()
        optimizer.zero_grad()
        loss = net(x.to(net[0].weight.dtype)).square().mean()
        (scaler.scale(loss) if scales else loss).backward()
        if clips:
            reef.clip_grad_norm_(sharded.parameters(), 1e-3, group)
        if scales:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        waits.append(host_waits() - before)
    if delayed:
        optimizer.close()
    if sharded:
        sharded.end()
    return waits[WARM_STEPS:]


def rows(kind: str, ranks: int, buckets: int):
    """Yields options, and the numbers of waits that a step with them may have. `by_device` counts an exchange between hosts that
    must go by way of the device, because the group has no other backend."""
    by_device = 1 if kind == "nccl alone" and ranks > 1 else 0
    for stage in STAGES:
        asks = by_device if stage != "replicate" else 0  # whether a step was made
        yield {"stage": stage}, {by_device + asks}
        # The host makes the step, so it waits for the gradients; answers of other hosts are read at the same time.
        yield {"stage": stage, "offload": True}, {1 + asks}
        # The host must know before the step whether a gradient is not finite.
        yield {"stage": stage, "compression": "bfloat16"}, {1 + asks}
        yield {"stage": stage, "clips": True}, {1 + 2 * by_device + asks}  # the norm
    stage, asks = "gradients", by_device
    yield {"stage": stage, "mixed_precision": torch.bfloat16}, {by_device + asks}
    yield {"stage": stage, "compression": "bfloat16", "offload": True}, {1 + asks}
    yield {"stage": stage, "clips": True, "offload": True}, {1 + by_device + asks}
    yield {"stage": stage, "scales": True}, {1 + by_device + asks}
    # The thread of the delayed update waits for copies to the device that are still under way, at most twice an update, and is
    # counted in this step or in the next.
    yield {"stage": stage, "offload": True, "delayed": True}, set(range(asks, 4 + asks))
    if kind != "nccl alone":
        for method in METHODS:  # of which entries go from host to host, bucket by bucket; one rank looks at all at the end
            yield {"stage": stage, "compression": method}, {buckets if ranks > 1 else 1}


def main(kind: str, seed: int) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    group = group_of(kind)
    wrong = []

    def expect(expected, **row):
        lag = delays(seed + rank, kernel=20, copy=100, communication=200) if seed else contextlib.nullcontext()
        with lag:
            found = counted(group, device, **row)
        if not expected.issuperset(found):
            wrong.append(f"{row}: {found}, not {expected}")

    assert counted(None, device, 2) == [0] * STEPS
    for buckets in BUCKET_BYTES:
        for row, expected in rows(kind, ranks, buckets):
            expect(expected, buckets=buckets, **row)
    assert not wrong, "\n".join(wrong)
    print("done", flush=True)
    if kind not in ("alone", "reef"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    end_at_once()
