"""Pipelines over ranks, each rank a network namespace: reef.Pipeline and torch.distributed.pipelining, in fresh processes
(paced_pipeline.py). Stages sleep instead of computing, so what is measured is the order of actions, the overlap of messages, and
overhead. Links are slow so that messages are small, and cost no computing of their own. Beside each time of Reef's is what the
simulation says. `pipeline_bench.py slow_links` runs one part alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from hosts_on_bridge import hosts_on_bridge, run_command
from paced_pipeline import Job

MOST_SECONDS = 600
"""For all steps of a job: a schedule whose ranks wait for each other is left out."""
FORWARD_SECONDS = 0.040
SEGMENT_BYTES, HEADERS_BYTES = 1448, 66
"""Of TCP in an Ethernet frame."""
RATIOS = (0.0, 1.0, 2.0)
"""Seconds of a message over those of a rank's forward pass."""
OURS = ("chosen", "1f1b", "1f1b hops", "gpipe", "zero_bubble", "zero_bubble hops", "interleaved", "zbv")
TORCHS = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")


def bytes_per_second(megabits: int) -> float:
    return megabits * 1e6 / 8 * SEGMENT_BYTES / (SEGMENT_BYTES + HEADERS_BYTES) if megabits else 0.0


def hosts(count: int, megabits: int) -> contextlib.AbstractContextManager[list[str]]:
    """hosts_on_bridge(); from each to each other goes a link of its own. 0 `megabits`: links are as fast as they are."""

    def limit(_: int, name: str, __: str) -> None:
        if not megabits:
            return
        tc = ["tc", "-n", name]
        run_command(*tc, "qdisc", "add", "dev", "cable", "root", "handle", "1:", "htb", "default", "99")
        for other in range(count):
            run_command(*tc, "class", "add", "dev", "cable", "parent", "1:", "classid", f"1:{other + 1}", "htb", "rate", f"{megabits}mbit",
                "burst", "15k", "cburst", "15k")  # fmt: skip
            run_command(*tc, "filter", "add", "dev", "cable", "parent", "1:", "protocol", "ip", "u32", "match", "ip", "dst",
                f"10.79.0.{other + 1}/32", "flowid", f"1:{other + 1}")  # fmt: skip

    return hosts_on_bridge(count, limit)


Found = tuple[str, float, float | None, float]
"""The schedule's name, seconds of a step, those that are expected, and those of a rank's work."""


def run(job: Job, names: list[str]) -> Found | None:
    """None if ranks have failed, or were still waiting after MOST_SECONDS."""
    common = {**os.environ, "WORLD_SIZE": str(job.ranks * job.workers), "MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
              "GLOO_SOCKET_IFNAME": "cable", "JOB": json.dumps(asdict(job)), "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
    program = str(Path(__file__).resolve().with_name("paced_pipeline.py"))
    ranks = [subprocess.Popen(["ip", "netns", "exec", name, sys.executable, program], stdout=subprocess.PIPE, text=True,
                              env={**common, "RANK": str(rank), "LOCAL_RANK": "0"})
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


def report(place: str, job: Job, found: Found | None, more: str = "") -> None:
    if found is None:
        print(f"{place}, {job.library} {job.schedule}: its ranks have failed, or still waited after {MOST_SECONDS} s", file=sys.stderr)
        return
    name, seconds, expected, work = found
    context = f"median of {job.steps}; "
    if job.forward_seconds:
        context += f"{seconds / work:.3f} times a rank's work"
        if expected:
            context += f"; {seconds / expected:.3f} times the simulation"
    else:
        context += f"{(seconds - work) / job.micro_batches / 2 * 1e6:.0f} us for each pass with its message, besides the stages' own"
    if job.schedule == "chosen":
        context += f"; {name}"
    row = {"name": f"{place}/{job.library} {job.schedule}", "value": seconds, "unit": "s", "context": context + more}
    print(json.dumps(row), flush=True)


def compare(place: str, jobs: list[Job], names: list[str]) -> None:
    """Runs torch's and Reef's, and says how the chosen one compares with torch's 1F1B and torch's best."""
    found = {job: run(job, names) for job in jobs}
    torchs = {job.schedule: seconds[1] for job, seconds in found.items() if job.library == "torch" and seconds}
    best = min(torchs, key=torchs.get, default=None)
    for job, result in found.items():
        more = ""
        if job.schedule == "chosen" and result and best:
            more = f"; torch's 1F1B takes {torchs.get('1F1B', 0) / result[1]:.2f} times as long, its best here, {best}, {torchs[best] / result[1]:.2f} times"
        report(place, job, result, more)


def slow_links() -> None:
    """Four ranks, 16 micro-batches, links of 100 Mbit/s."""
    for ratio in RATIOS:
        rate = bytes_per_second(100 if ratio else 0)
        size = int(ratio * FORWARD_SECONDS * rate) // 4 * 4 or 4
        jobs = [Job(library, name, 4, 16, FORWARD_SECONDS, size, rate)
                for library, names in (("torch", TORCHS), ("reef", OURS)) for name in names]  # fmt: skip
        with hosts(4, 100 if ratio else 0) as names:
            compare(f"4 ranks, 16 micro-batches, message/forward {ratio:g}", jobs, names)


def gigabit() -> None:
    """Two ranks, one link of 1 Gbit/s, a message as long as a forward pass."""
    rate = bytes_per_second(1000)
    jobs = [Job(library, name, 2, 16, FORWARD_SECONDS, int(FORWARD_SECONDS * rate) // 4 * 4, rate)
            for library, names in (("torch", TORCHS), ("reef", ("chosen", "1f1b", "1f1b hops", "zero_bubble hops"))) for name in names]  # fmt: skip
    with hosts(2, 1000) as names:
        compare("2 ranks, 16 micro-batches, 1 Gbit/s, message/forward 1", jobs, names)


def few_micro_batches() -> None:
    """As many micro-batches as ranks, and links that take no time."""
    jobs = [Job(library, name, 4, 4, FORWARD_SECONDS)
            for library, names in (("torch", TORCHS), ("reef", ("chosen", "1f1b", "zbv", "greedy"))) for name in names]  # fmt: skip
    with hosts(4, 0) as names:
        compare("4 ranks, 4 micro-batches", jobs, names)


def without_barrier() -> None:
    """Ten batches by train(), synchronous and not."""
    with hosts(4, 0) as names:
        for schedule in ("1f1b", "zero_bubble", "zbv", "pipedream", "pipedream_2bw", "pipemare"):
            job = Job("reef", schedule, 4, 4, FORWARD_SECONDS, steps=3, batches=10)
            report("4 ranks, 10 batches of 4 micro-batches", job, run(job, names))


def virtual_workers() -> None:
    """Two workers of two ranks, of which each takes longer for every other batch, when the other takes less; ten batches by train()."""
    with hosts(4, 0) as names:
        for staleness, swing in ((0, 0.0), (0, 0.5), (1, 0.5), (2, 0.5)):
            job = Job("reef", "hetpipe", 2, 4, FORWARD_SECONDS, steps=3, batches=10, workers=2, staleness=staleness, swing=swing)
            report(f"2 workers of 2 ranks, 10 batches of 4 micro-batches, which take {swing:.0%} more or less, staleness {staleness}", job, run(job, names))


def overhead() -> None:
    """Two ranks whose stages do next to nothing, so what is left is the runtime: a forward and a backward pass for each of 256 micro-batches,
    with their messages."""
    with hosts(2, 0) as names:
        for library, schedules in (("torch", ("1F1B", "GPipe")), ("reef", ("1f1b", "gpipe"))):
            for schedule in schedules:
                job = Job(library, schedule, 2, 256, 0.0, steps=7)
                report("2 ranks, 256 micro-batches, empty stages", job, run(job, names))


PARTS = {part.__name__: part for part in (slow_links, gigabit, few_micro_batches, without_barrier, virtual_workers, overhead)}


def can_make_hosts() -> bool:
    try:
        with hosts(2, 100):
            return True
    except (FileNotFoundError, subprocess.CalledProcessError) as reason:
        print(f"network namespaces cannot be made here: {reason}", file=sys.stderr)
        return False


if __name__ == "__main__" and can_make_hosts():
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
