"""Pipelines of four ranks over links of 100 Mbit/s, each rank a network namespace: reef.Pipeline and torch.distributed.pipelining, in
fresh processes. Stages sleep instead of computing, so ranks share this machine's cores without waiting for them; what is measured
is the order of actions, the overlap of messages, and overhead. The links are slow so that messages are small, and cost no
computing of their own. Beside each time of Reef's is what `simulate` says."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from hosts_on_bridge import hosts_on_bridge, run_command
from torch.distributed import pipelining

RANKS, MICRO_BATCHES, STEPS = 4, 16, 5
MOST_SECONDS = 600
"""For all steps of a mode: a schedule whose ranks wait for each other is left out."""
STAGES = 2 * RANKS
FORWARD_SECONDS = 0.040
"""Of a whole rank, which has two stages, for a micro-batch; its I and its W take as long."""
SEGMENT_BYTES, HEADERS_BYTES = 1448, 66
"""Of TCP in an Ethernet frame."""
LINK_BYTES_PER_SECOND = 1e8 / 8 * SEGMENT_BYTES / (SEGMENT_BYTES + HEADERS_BYTES)
RATIOS = (0.0, 1.0, 2.0)
"""Seconds of a message over those of a rank's forward pass."""
OURS = ("chosen", "1f1b", "1f1b hops", "gpipe", "zero_bubble", "zero_bubble hops", "interleaved", "zbv")
TORCHS = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
"""Not those that split backward passes: torch makes their weights' gradients without AccumulateGrad, whose hook is what sleeps here."""


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()  # torch splits no backward pass at a view

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class PacedStage(torch.nn.Module):
    """Multiplies by a weight, and sleeps: in F, in I, and when the weight's gradient is made, in W."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = torch.nn.Parameter(torch.ones(1, 1))
        self.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(seconds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeps.apply(x.reshape(-1, 1).mm(self.weight).view_as(x), self.seconds)


def stages() -> list[PacedStage]:
    return [PacedStage(FORWARD_SECONDS / 2) for _ in range(STAGES)]


def loss_of(output: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return output[:, :1].sum()


def profile(message_bytes: int):
    """What a stage costs, measured by itself."""
    import reef

    stage, x = PacedStage(FORWARD_SECONDS / 2), torch.ones(1, max(1, message_bytes // 4), requires_grad=True)
    forward, backward = [], []
    for _ in range(7):
        begin = time.perf_counter()
        y = stage(x)
        middle = time.perf_counter()
        y.backward(torch.ones_like(y))
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
    half = statistics.median(backward) / 2
    cost = reef.PipelineChunkCost(statistics.median(forward), half, half, output_bytes=message_bytes)
    links = [reef.Link(0.0, LINK_BYTES_PER_SECOND)] if message_bytes > 4 else []
    return reef.PipelineProfile([cost] * STAGES, links=links)


def reefs(mode: str, message_bytes: int):
    """A function that makes a step, and the seconds that are expected of it."""
    import reef

    profiles = [profile(message_bytes) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(profiles)  # all plan alike
    (whole,) = profiles
    name, *deeper = mode.split()
    if name == "chosen":
        plan = reef.plan_pipeline(whole, RANKS, MICRO_BATCHES)
        schedule, cuts = plan.schedule, list(plan.cuts)
    else:
        chunks = 2 if name in ("interleaved", "zbv") else 1
        message_seconds = [message_bytes / LINK_BYTES_PER_SECOND] * (RANKS - 1)
        splits = name == "zero_bubble"
        hops = reef.hops_for(message_seconds, FORWARD_SECONDS, 2 * FORWARD_SECONDS, splits=splits) if deeper else []
        schedule = reef.pipeline_schedule(name, ranks=RANKS, micro_batches=MICRO_BATCHES, chunks_per_rank=chunks, hops=hops)
        size = STAGES // (RANKS * chunks)
        cuts = list(range(size, STAGES, size))
    pipeline = reef.Pipeline(stages(), dist.group.WORLD, schedule=schedule, cuts=cuts)
    batch = torch.ones(MICRO_BATCHES, max(1, message_bytes // 4))
    expected = schedule.cost(whole.cut(cuts)).makespan_seconds
    return lambda: pipeline.step(batch, loss_of), expected, schedule.name


def torchs(mode: str, message_bytes: int):
    kind = pipelining.schedules.get_schedule_class(mode)
    rank, all_stages = dist.get_rank(), stages()
    if issubclass(kind, pipelining.schedules.PipelineScheduleSingle):
        module = torch.nn.Sequential(*all_stages[2 * rank : 2 * rank + 2])
        stage = pipelining.PipelineStage(module, rank, RANKS, torch.device("cpu"))
        schedule = kind(stage, MICRO_BATCHES, loss_fn=loss_of)
        has_last = rank == RANKS - 1
    else:
        numbers = (rank, STAGES - 1 - rank) if mode == "ZBVZeroBubble" else (rank, rank + RANKS)
        own = [pipelining.PipelineStage(all_stages[number], number, STAGES, torch.device("cpu")) for number in numbers]
        schedule = kind(own, MICRO_BATCHES, loss_fn=loss_of)
        has_last = STAGES - 1 in numbers
    batch = torch.ones(MICRO_BATCHES, max(1, message_bytes // 4))
    given = (batch,) if rank == 0 else ()
    target = {"target": torch.zeros(MICRO_BATCHES, 1)} if has_last else {}
    return lambda: schedule.step(*given, **target, losses=[]), None, mode


def run_rank(library: str, mode: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    message_bytes = int(float(os.environ["RATIO"]) * FORWARD_SECONDS * LINK_BYTES_PER_SECOND) // 4 * 4 or 4
    step, expected, name = (reefs if library == "reef" else torchs)(mode, message_bytes)
    step()
    times = []
    for _ in range(STEPS):
        dist.barrier()
        begin = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(json.dumps([name, statistics.median(times), expected]), flush=True)


def hosts(limited: bool) -> contextlib.AbstractContextManager[list[str]]:
    """hosts_on_bridge(); from each to each other goes a link of its own."""

    def limit(_: int, name: str, __: str) -> None:
        if not limited:
            return
        tc = ["tc", "-n", name]
        run_command(*tc, "qdisc", "add", "dev", "cable", "root", "handle", "1:", "htb", "default", "99")
        for other in range(RANKS):
            run_command(*tc, "class", "add", "dev", "cable", "parent", "1:", "classid", f"1:{other + 1}", "htb", "rate", "100mbit",
                "burst", "15k", "cburst", "15k")  # fmt: skip
            run_command(*tc, "filter", "add", "dev", "cable", "parent", "1:", "protocol", "ip", "u32", "match", "ip", "dst",
                f"10.79.0.{other + 1}/32", "flowid", f"1:{other + 1}")  # fmt: skip

    return hosts_on_bridge(RANKS, limit)


def run_mode(names: list[str], library: str, mode: str, ratio: float) -> tuple[str, float, float | None] | None:
    """The schedule's name, seconds of a step, and those that are expected; None if ranks have failed, or were still waiting after
    MOST_SECONDS."""
    common = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
              "GLOO_SOCKET_IFNAME": "cable", "RATIO": str(ratio), "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
    ranks = [subprocess.Popen(["ip", "netns", "exec", name, sys.executable, str(Path(__file__).resolve()), "--rank", library, mode],
                              env={**common, "RANK": str(rank), "LOCAL_RANK": "0"}, stdout=subprocess.PIPE, text=True)
             for rank, name in enumerate(names)]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=MOST_SECONDS)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = next((line for line in printed[0].splitlines() if line.startswith("[")), None)
    return found and json.loads(found)


def measure(ratio: float) -> None:
    with hosts(limited=ratio > 0) as names:
        found = {(library, mode): run_mode(names, library, mode, ratio)
                 for library, modes in (("torch", TORCHS), ("reef", OURS)) for mode in modes}  # fmt: skip
    torchs = {mode: run[1] for (library, mode), run in found.items() if library == "torch" and run}
    best = min(torchs, key=torchs.get)
    ideal = MICRO_BATCHES * 3 * FORWARD_SECONDS
    for (library, mode), run in found.items():
        if run is None:
            print(f"{library} {mode}, {ratio:g}: its ranks have failed, or still waited after {MOST_SECONDS} s", file=sys.stderr)
            continue
        name, seconds, expected = run
        context = f"median of {STEPS} steps; {seconds / ideal:.3f} times a rank's work"
        if expected is not None:
            context += f"; {seconds / expected:.3f} times the simulation"
        if mode == "chosen":
            context += (f"; {name}; torch's 1F1B takes {torchs['1F1B'] / seconds:.2f} times as long, its best here, {best}, "
                        f"{torchs[best] / seconds:.2f} times")  # fmt: skip
        row = {"name": f"{RANKS} ranks, {MICRO_BATCHES} micro-batches, message/forward {ratio:g}/{library} {mode}", "value": seconds,
               "unit": "s a step", "context": context}  # fmt: skip
        print(json.dumps(row), flush=True)


def main() -> None:
    try:
        with hosts(limited=True):
            pass
    except (FileNotFoundError, subprocess.CalledProcessError) as reason:
        print(f"network namespaces cannot be made here: {reason}", file=sys.stderr)
        return
    for ratio in RATIOS:
        measure(ratio)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(*sys.argv[2:])
    else:
        main()
