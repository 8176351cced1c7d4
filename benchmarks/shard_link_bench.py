"""Training on two hosts that a link of 1 Gbit/s joins, played by two network namespaces (token buckets on both ends): how much of
what is sent is hidden behind what is computed. Beside it the same over the same link without a limit, which is what a step takes
to compute, work of the network's stack included: the hosts share this machine's cores. The model of peers/shard_train.py; every
mode in turn in fresh processes."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
import shard_train

SEGMENT_BYTES, HEADERS_BYTES = 1448, 66
"""Of TCP in an Ethernet frame."""
LINK_BYTES_PER_SECOND = 1e9 / 8 * SEGMENT_BYTES / (SEGMENT_BYTES + HEADERS_BYTES)
BATCHES, ROUNDS = (2, 8, 16), 2
"""With the first a step takes less to compute than to send; with the second more, but backward alone, while gradients can be
sent, about as long; with the last backward too takes more."""
MODES = ("DistributedDataParallel", "reef replicate", "reef gradients", "reef parameters")


def run_rank(mode: str) -> None:
    shard_train.BATCH = int(os.environ["BATCH"])
    shard_train.begin_rank()
    shard_train.end_rank(shard_train.measure(*shard_train.set_up(mode)))


@contextlib.contextmanager
def hosts(limited: bool) -> Iterator[list[str]]:
    """Names of two namespaces, each with an interface `cable`."""

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    names = [f"reef{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            if limited:
                run("tc", "-n", name, "qdisc", "add", "dev", "cable", "root", "tbf", "rate", "1gbit", "burst", "256k",
                    "latency", "100ms")  # fmt: skip
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run_mode(mode: str, batch: int, limited: bool) -> dict[str, float]:
    """The largest of what the two ranks find."""
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
              "GLOO_SOCKET_IFNAME": "cable", "BATCH": str(batch)}  # fmt: skip
    with hosts(limited) as names:
        ranks = [subprocess.Popen(["ip", "netns", "exec", name, sys.executable, str(Path(__file__).resolve()), "--rank", mode],
                                  env={**common, "RANK": str(rank), "LOCAL_RANK": "0"}, stdout=subprocess.PIPE, text=True)
                 for rank, name in enumerate(names)]  # fmt: skip
        printed = [rank.communicate(timeout=600)[0] for rank in ranks]
    return shard_train.largest(mode, len(ranks), "".join(printed))


def main() -> None:
    try:
        with hosts(limited=True):
            pass
    except (FileNotFoundError, subprocess.CalledProcessError) as reason:
        print(f"network namespaces cannot be made here: {reason}", file=sys.stderr)
        return
    for batch in BATCHES:
        measure(batch)


def measure(batch: int) -> None:
    alone, free, linked = [], {mode: [] for mode in MODES}, {mode: [] for mode in MODES}
    for _ in range(ROUNDS):
        alone.append(run_mode(shard_train.ALONE, batch, limited=False))
        for mode in MODES:
            free[mode].append(run_mode(mode, batch, limited=False))
            linked[mode].append(run_mode(mode, batch, limited=True))

    def seconds_of(runs: list[dict[str, float]]) -> float:
        return statistics.median(one["seconds"] for one in runs)

    rounds = f"median of {ROUNDS} rounds in turn"
    name = f"1 Gbit/s, batch of {batch} x {shard_train.LENGTH}"
    row(f"{name}/{shard_train.ALONE}", seconds_of(alone), rounds)
    for mode in MODES:
        sending = statistics.median(one["wire"] for one in linked[mode]) / LINK_BYTES_PER_SECOND
        ratio = statistics.median(one["seconds"] / max(unlimited["seconds"], sending)
                                  for one, unlimited in zip(linked[mode], free[mode], strict=True))  # fmt: skip
        row(f"{name}/{mode}", seconds_of(linked[mode]),
            f"{rounds}; {ratio:.3g} times the longer of a step over a link without a limit, {seconds_of(free[mode]):.3g} s, and of "
            f"sending, {sending:.3g} s")  # fmt: skip


def row(name: str, seconds: float, context: str) -> None:
    print(json.dumps({"name": name, "value": seconds, "unit": "s a step", "context": context}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2])
    else:
        main()
