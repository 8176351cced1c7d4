"""Training over links of 1 Gbit/s with as many hosts as ranks, in the form of the table of Shi et al., "A Distributed Synchronous SGD
Algorithm with Global Top-k Sparsification for Low Bandwidth Networks" (ICDCS 2019): what all ranks train on in a second, dense and
with the largest thousandth of the gradients, and what that is of as many ranks alone. A rank is a process of one thread with a
quota of the processors, the same with one rank as with eight; its network's stack, which the kernel runs, is beside the quota. The
model is a perceptron of 25 million parameters, its batch small, so that a step has little to compute for what it sends. Every mode
in processes of its own; medians of steps, of the slowest rank."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import compress_link_bench

RATE = "1gbit"
RANKS = (1, 2, 4, 8)
MODES = ("none", "topk", "gtopk_tree", "gtopk")
WIDTH, LAYERS, BATCH = 2236, 5, 8
DENSITY = 0.001
STEPS_BEFORE, STEPS = 10, 10
"""The first steps of a sparse method on eight ranks take up to twice as long as later ones."""
PERIOD_MICROSECONDS = 10_000
"""The period of the quota. A rank that has used up its share waits for the next period, so a short one delays the others less."""
KEEPS_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""The environment in which glibc keeps freed memory, as the allocators do that people train with (harness.h)."""
ROOT = Path("/sys/fs/cgroup")


def processors() -> float:
    """The processors that each rank may use: in the largest world the ranks use all of them."""
    return (os.cpu_count() or 1) / max(RANKS)


@contextlib.contextmanager
def processor_quotas(count: int) -> Iterator[list[Path]]:
    """Makes control groups with that quota each. Throws OSError where none can be made."""
    unified = (ROOT / "cgroup.controllers").exists()
    if unified and "cpu" not in (ROOT / "cgroup.subtree_control").read_text().split():
        (ROOT / "cgroup.subtree_control").write_text("+cpu")
    groups = [(ROOT if unified else ROOT / "cpu") / f"reef-{os.getpid()}-{number}" for number in range(count)]
    quota = str(round(processors() * PERIOD_MICROSECONDS))
    try:
        for group in groups:
            group.mkdir()
            if unified:
                (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
                (group / "cpu.cfs_quota_us").write_text(quota)
        yield groups
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def run_rank(mode: str) -> None:
    import torch

    import reef

    print("READY", flush=True)
    sys.stdin.readline()
    torch.set_num_threads(1)
    group = reef.init_process_group(timeout_seconds=300)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers[:-1])
    compression = reef.Compression(mode, density=None if mode == "none" else DENSITY)
    sharded = reef.shard(model, group, compression=compression)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01, momentum=0.9, fused=True)
    batch, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    seconds = []
    for step in range(STEPS_BEFORE + STEPS):
        reef.barrier(group)
        begin = time.perf_counter()
        torch.nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        slowest = torch.zeros(group.size(), dtype=torch.float64)
        slowest[group.rank()] = time.perf_counter() - begin
        reef.all_reduce([slowest], group, reduction="sum")
        if step >= STEPS_BEFORE:
            seconds.append(slowest.max().item())
    if group.rank() == 0:
        print("RESULT " + json.dumps(seconds), flush=True)
    reef.barrier(group)
    os._exit(0)


def run(ranks: int, mode: str) -> list[float]:
    """Seconds of each step."""
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1",
                   **compress_link_bench.ON_HOSTS, **KEEPS_PAGES}  # fmt: skip
    with compress_link_bench.hosts(ranks, RATE) as names, processor_quotas(ranks) as groups:
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", mode]
        started = [subprocess.Popen(["ip", "netns", "exec", name, *command], env={**environment, "RANK": str(rank)},
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                   for rank, name in enumerate(names)]  # fmt: skip
        for rank in started:
            assert rank.stdout.readline() == "READY\n"
        for rank, group in zip(started, groups, strict=True):
            (group / "cgroup.procs").write_text(str(rank.pid))
            rank.stdin.write("go\n")
            rank.stdin.flush()
        printed = "".join(rank.communicate(timeout=1200)[0] for rank in started)
    return next(json.loads(line[7:]) for line in printed.splitlines() if line.startswith("RESULT "))


def main() -> None:
    try:
        with compress_link_bench.hosts(2, RATE), processor_quotas(1):
            pass
    except (OSError, subprocess.CalledProcessError) as reason:
        print(f"network namespaces and control groups cannot be made here: {reason}", file=sys.stderr)
        return
    alone = 0.0
    for ranks in RANKS:
        dense = 0.0
        for mode in MODES if ranks > 1 else MODES[:1]:
            seconds = run(ranks, mode)
            rate = ranks * BATCH / statistics.median(seconds)
            dense = dense or rate
            alone = alone or rate
            context = (f"{rate / dense:.3g} times {MODES[0]}, {100 * rate / (ranks * alone):.3g} % of as many ranks alone; {STEPS} steps of "
                       f"{min(seconds):.3g} to {max(seconds):.3g} s; {processors():.3g} processors a rank")  # fmt: skip
            print(json.dumps({"name": f"{RATE}, {ranks} ranks/{mode}", "value": rate, "unit": "samples a second", "context": context}),
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(*sys.argv[2:])
    else:
        main()
