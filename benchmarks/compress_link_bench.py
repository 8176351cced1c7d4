"""Exchanges of gradients over slow links: as many hosts as ranks, played by network namespaces on a bridge (token buckets on both
ends of every cable, so small that no message passes at once). What a step takes from the moment at which a gradient of 25 million
float32 is there until all ranks have what they step with: with the selection of what is sent (density 0.001), and of the exchange
alone, of as many entries, beside what price_exchange() says for the link that measure_link() has found. Beside them what is written
in Python with torch.topk: Top-k with an all-gather, and gTop-k as it was published. The methods by which every element travels are
beside the dense exchange in buckets of the default size, of 25 layers. Hosts share this machine's cores, one thread a rank. Modes
take turn in the same processes; medians of rounds, of the slowest rank. Over loopback, where work is most of it, the methods of 16
bits beside the dense exchange: `--loopback` for that alone."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hosts_on_bridge import hosts_on_bridge, run_command

ELEMENTS, DENSITY = 25_000_000, 0.001
ROUNDS = {"alone": 31, "whole": 5, "buckets": 9, "loopback": 15}
LAYERS = 25  # of the buckets
BUCKETS = {"1gbit": (16_000, 15_000), "100mbit": (4_000, 3_000)}
"""By rate: bytes that a token bucket lets pass at once, and the largest segment that is handed to it."""
RATES = tuple(BUCKETS)
RANKS = (2, 4, 8)
SPARSE = ("topk", "gtopk_tree", "gtopk")
PYTHON = ("python topk", "python gtopk_tree")
DENSE = ("bfloat16", "qsgd", "sign", "powersgd", "powersgd_alternating")
LOOPBACK = ("none", "bfloat16", "float16")


def modes_of(kind: str) -> tuple[str, ...]:
    if kind == "alone":
        return SPARSE
    if kind == "loopback":
        return LOOPBACK
    return ("none", *SPARSE, *PYTHON) if kind == "whole" else ("none", *DENSE)


def hosts(count: int, rate: str) -> contextlib.AbstractContextManager[list[str]]:
    """hosts_on_bridge(), with token buckets on both ends of each cable."""

    def limit(number: int, name: str, bridge: str) -> None:
        burst, segment = map(str, BUCKETS[rate])
        for host, device in ((name, "cable"), (bridge, f"port{number}")):
            run_command("ip", "-n", host, "link", "set", device, "gso_max_size", segment)
            run_command("tc", "-n", host, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")

    return hosts_on_bridge(count, limit)


ON_HOSTS = {"MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "cable"}
"""What ranks on hosts() find in their environment."""


def kinds_at(rate: str, ranks: int) -> tuple[str, ...]:
    """What is measured on such links: the methods by which every element travels at two ranks only."""
    if rate != RATES[0]:
        return ("alone",)
    return ("alone", "whole", "buckets") if ranks == 2 else ("alone", "whole")


def python_exchange(group, elements: int, tree: bool) -> Callable:
    """Gives a function that makes a gradient the mean of all ranks' largest elements, and holds back the rest."""
    import torch
    import torch.distributed as dist

    ranks, rank, k = group.size(), group.rank(), math.ceil(DENSITY * elements)
    held_back = torch.zeros(elements)

    def merged(values, places, others, other_places):
        all_places, at = torch.unique(torch.cat((places, other_places)), return_inverse=True)
        sums = torch.zeros(len(all_places)).index_add_(0, at, torch.cat((values, others)))
        largest = torch.topk(sums.abs(), k, sorted=False).indices
        return sums[largest].contiguous(), all_places[largest].contiguous()

    def exchange(gradient) -> None:
        held_back.add_(gradient)
        places = torch.topk(held_back.abs(), k, sorted=False).indices
        values, own = held_back[places], places.int()
        held_back[places] = 0
        gradient.zero_()
        if not tree:
            all_values, all_places = [torch.empty_like(values) for _ in range(ranks)], [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(all_values, values, group)
            dist.all_gather(all_places, own, group)
            for each, at in zip(all_values, all_places, strict=True):
                gradient.index_add_(0, at, each, alpha=1 / ranks)
            return
        sums, kept, distance = values, own, 1
        while distance < ranks:
            if rank % (2 * distance) == 0 and rank + distance < ranks:
                others, other_places = torch.empty_like(values), torch.empty_like(own)
                group.recv([others], rank + distance, 0).wait()
                group.recv([other_places], rank + distance, 1).wait()
                sums, kept = merged(sums, kept, others, other_places)
            elif rank % (2 * distance) == distance:
                group.send([sums], rank - distance, 0).wait()
                group.send([kept], rank - distance, 1).wait()
            distance *= 2
        sums, kept = sums.clone(), kept.clone()
        group.broadcast(sums, 0).wait()
        group.broadcast(kept, 0).wait()
        lost = ~torch.isin(own, kept)
        held_back[places[lost]] += values[lost]
        gradient.index_add_(0, kept, sums, alpha=1 / ranks)

    return exchange


def run_rank(kind: str) -> None:
    import torch

    import reef

    torch.set_num_threads(1)
    group = reef.init_process_group(timeout_seconds=300)
    torch.manual_seed(group.rank())
    # To measure the exchange without selection, a small gradient is sent with density 1.
    whole = kind != "alone"
    elements, density = (ELEMENTS, DENSITY) if whole else (int(ELEMENTS * DENSITY), 1.0)
    parameters = LAYERS if kind == "buckets" else 1
    side = math.isqrt(elements // parameters)
    shape = (side, side) if whole else (elements,)
    gradients = [torch.randn(shape) for _ in range(parameters)]
    fit = reef.measure_link(group)
    work = reef.measure_exchange_work(group, density=density, elements=elements)
    prices = reef.price_exchange(fit.link, elements, ranks=group.size(), work=work, density=density, shapes=[shape] * parameters)
    steps, found = [], {}

    def reef_step(mode: str) -> Callable[[], tuple[float, int]]:
        module = torch.nn.Module()
        module.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for _ in gradients)
        sharded = reef.shard(module, group, compression=reef.Compression(mode, density=density if mode in SPARSE else None))

        def step() -> tuple[float, int]:
            module.weights.zero_grad()
            given = [gradient.clone() for gradient in gradients]
            reef.barrier(group)
            before, begin = sharded.sent_bytes, time.perf_counter()
            torch.autograd.backward(list(module.weights), given)
            return time.perf_counter() - begin, sharded.sent_bytes - before

        return step

    def python_step(mode: str) -> Callable[[], tuple[float, int]]:
        exchange = python_exchange(group, elements, tree=mode.endswith("tree"))

        def step() -> tuple[float, int]:
            given = gradients[0].flatten().clone()
            reef.barrier(group)
            begin = time.perf_counter()
            exchange(given)
            return time.perf_counter() - begin, 0

        return step

    modes = modes_of(kind)
    steps = [(mode, (python_step if mode in PYTHON else reef_step)(mode)) for mode in modes]
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for round_number in range(ROUNDS[kind] + 1):
        for mode, step in steps:
            took, sent = step()
            slowest = torch.zeros(group.size(), dtype=torch.float64)
            slowest[group.rank()] = took
            reef.all_reduce([slowest], group, reduction="sum")
            if round_number > 0:
                seconds[mode].append(slowest.max().item())
            found[mode] = {"bytes": sent}
    for mode in modes:
        of_first = [took / first for took, first in zip(seconds[mode], seconds[modes[0]], strict=True)]
        found[mode] |= {"seconds": statistics.median(seconds[mode]), "low": min(seconds[mode]), "high": max(seconds[mode]),
                        "of_first": statistics.quantiles(of_first, n=4)}  # fmt: skip
        if mode not in PYTHON:
            found[mode]["priced"] = prices[mode].seconds
    if group.rank() == 0:
        print("RESULT " + json.dumps({"link": str(fit), "modes": found}), flush=True)
    reef.barrier(group)
    os._exit(0)


def run(ranks: int, rate: str | None, kind: str) -> tuple[str, dict[str, dict]]:
    """What rank 0 has found: of the link, and of the modes. Without a rate over loopback."""
    common = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", kind]

    def wait(prefixes: list[list[str]], **where: str) -> str:
        started = [subprocess.Popen([*prefix, *command], env={**common, **where, "RANK": str(rank), "LOCAL_RANK": "0"},
                                    stdout=subprocess.PIPE, text=True) for rank, prefix in enumerate(prefixes)]  # fmt: skip
        return "".join(rank.communicate(timeout=1200)[0] for rank in started)

    if rate is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        printed = wait([[]] * ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    else:
        with hosts(ranks, rate) as names:
            printed = wait([["ip", "netns", "exec", name] for name in names], **ON_HOSTS)
    found = next(json.loads(line[7:]) for line in printed.splitlines() if line.startswith("RESULT "))
    return found["link"], found["modes"]


def loopback() -> None:
    link, modes = run(2, None, "loopback")
    for mode, found in modes.items():
        low, median, high = found["of_first"]
        beside = f"{median:.3g} times {LOOPBACK[0]}, median of ratios in the same round, quartiles {low:.3g} to {high:.3g}"
        row(f"loopback, 2 ranks, {ELEMENTS} float32/{mode}", found, f"{beside}; link of {link}; {ROUNDS['loopback']} rounds")


def main() -> None:
    loopback()
    if sys.argv[1:] == ["--loopback"]:
        return
    try:
        with hosts(2, "1gbit"):
            pass
    except (FileNotFoundError, subprocess.CalledProcessError) as reason:
        print(f"network namespaces cannot be made here: {reason}", file=sys.stderr)
        return
    for rate in RATES:
        for ranks in RANKS:
            for kind in kinds_at(rate, ranks):
                link, modes = run(ranks, rate, kind)
                title = {"alone": f"{int(ELEMENTS * DENSITY)} entries alone", "whole": f"{ELEMENTS} float32",
                         "buckets": f"{ELEMENTS} float32 in buckets"}[kind]  # fmt: skip
                for mode, found in modes.items():
                    if kind == "alone":
                        beside = [f"{found['seconds'] / modes[other]['seconds']:.3g} times {other}" for other in SPARSE if other != mode]
                    else:
                        beside = [f"{modes[other]['seconds'] / found['seconds']:.3g} times as fast as {other}"
                                  for other in ("none", *PYTHON) if other in modes]  # fmt: skip
                    row(f"{rate}, {ranks} ranks, {title}/{mode}", found, ", ".join(beside) + f"; link of {link}; {ROUNDS[kind]} rounds")


def row(name: str, found: dict[str, float], context: str) -> None:
    if "priced" in found:
        context += f"; {found['seconds'] / found['priced']:.3g} times its price; {found['bytes']} bytes sent by rank 0"
    context += f"; {found['low']:.3g} to {found['high']:.3g} s"
    print(json.dumps({"name": name, "value": found["seconds"], "unit": "s", "context": context}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2])
    else:
        main()
