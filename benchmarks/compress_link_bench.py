"""Exchanges of gradients over slow links: as many hosts as ranks, played by network namespaces on a bridge (token buckets on both
ends of every cable). What a step takes from the moment at which a gradient of 25 million float32 is there until all ranks have what
they step with: with the selection of what is sent (density 0.001), and of the exchange alone, of as many entries. Hosts share this
machine's cores, one thread a rank. Modes take turns in the same processes; medians of rounds, of the slowest rank."""

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

ELEMENTS, DENSITY, ROUNDS = 25_000_000, 0.001, 5
RATES = ("1gbit", "100mbit")
RANKS = (2, 4, 8)
SPARSE = ("topk", "gtopk_tree", "gtopk")
WHOLE = ("none", "bfloat16", *SPARSE)


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[list[str]]:
    """Names of namespaces, each with an interface `cable` to a bridge in one of its own."""

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    def limit(name: str, device: str) -> None:
        run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "64k", "latency", "400ms")

    switch = f"reef{os.getpid()}s"
    names = [f"reef{os.getpid()}n{number}" for number in range(count)]
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", "cable", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
            run("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"10.79.0.{number + 1}/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            limit(name, "cable")
            limit(switch, f"port{number}")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run_rank(whole: bool) -> None:
    import torch

    import reef

    torch.set_num_threads(1)
    group = reef.init_process_group(timeout_seconds=300)
    torch.manual_seed(group.rank())
    # Without selection, a gradient of as many elements as entries is sent whole.
    elements, density = (ELEMENTS, DENSITY) if whole else (int(ELEMENTS * DENSITY), 1.0)
    gradient = torch.randn(elements)
    modes = WHOLE if whole else SPARSE
    modules, found = [], {}
    for mode in modes:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.zeros(elements))
        sharded = reef.shard(module, group, compression=reef.Compression(mode, density=density if mode in SPARSE else None))
        modules.append((mode, module, sharded))
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for round_number in range(ROUNDS + 1):
        for mode, module, sharded in modules:
            module.weight.grad = None
            given = gradient.clone()
            reef.barrier(group)
            before, begin = sharded.sent_bytes(), time.perf_counter()
            torch.autograd.backward([module.weight], [given])
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            sent = sharded.sent_bytes() - before
            slowest = torch.zeros(group.size(), dtype=torch.float64)
            slowest[group.rank()] = took
            reef.all_reduce([slowest], group, reduction="sum")
            if round_number > 0:
                seconds[mode].append(slowest.max().item())
            found[mode] = {"bytes": sent}
    for mode in modes:
        found[mode]["seconds"] = statistics.median(seconds[mode])
        found[mode]["low"], found[mode]["high"] = min(seconds[mode]), max(seconds[mode])
    if group.rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    reef.barrier(group)
    os._exit(0)


def run(ranks: int, rate: str, whole: bool) -> dict[str, dict[str, float]]:
    """What rank 0 has found."""
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
              "GLOO_SOCKET_IFNAME": "cable"}  # fmt: skip
    with hosts(ranks, rate) as names:
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", "whole" if whole else "alone"]
        started = [subprocess.Popen(["ip", "netns", "exec", name, *command], env={**common, "RANK": str(rank), "LOCAL_RANK": "0"},
                                    stdout=subprocess.PIPE, text=True) for rank, name in enumerate(names)]  # fmt: skip
        printed = "".join(rank.communicate(timeout=1200)[0] for rank in started)
    return next(json.loads(line[7:]) for line in printed.splitlines() if line.startswith("RESULT "))


def main() -> None:
    try:
        with hosts(2, "1gbit"):
            pass
    except (FileNotFoundError, subprocess.CalledProcessError) as reason:
        print(f"network namespaces cannot be made here: {reason}", file=sys.stderr)
        return
    for rate in RATES:
        for ranks in RANKS:
            alone = run(ranks, rate, whole=False)
            for mode, found in alone.items():
                beside = ", ".join(f"{found['seconds'] / alone[other]['seconds']:.3g} times {other}" for other in SPARSE if other != mode)
                row(f"{rate}, {ranks} ranks, {int(ELEMENTS * DENSITY)} entries alone/{mode}", found, beside)
            if rate == RATES[0]:
                whole = run(ranks, rate, whole=True)
                for mode, found in whole.items():
                    row(f"{rate}, {ranks} ranks, {ELEMENTS} float32/{mode}", found, f"{whole['none']['seconds'] / found['seconds']:.3g} times as fast as none")


def row(name: str, found: dict[str, float], context: str) -> None:
    context += f"; {found['bytes']} bytes sent by rank 0; {found['low']:.3g} to {found['high']:.3g} s in {ROUNDS} rounds"
    print(json.dumps({"name": name, "value": found["seconds"], "unit": "s", "context": context}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2] == "whole")
    else:
        main()
