"""Communication hooks of torch's DistributedDataParallel: Reef's (reef.ddp_hook) against those that programs have today, torch's own
powerSGD_hook and a top-k in Python (torch.topk, all-gather, residual). Passes of backward over 25 million float32 in 24 matrices, by
pairs: both models live in the same processes and take turns, one thread a rank; medians of rounds, of the slowest rank. Without an
option over loopback, where the ratio is one of work; with `--link 1gbit` between network namespaces (compress_link_bench.py)."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

MATRICES, SIDE, ROUNDS, RANKS = 24, 1024, 5, (2, 4)
RANK, DENSITY = 4, 0.001
ONE_BUCKET_MIB = 1000
PAIRS = {"powersgd": "torch's powerSGD_hook", "topk": "top-k in Python", "gtopk": "top-k in Python"}
NOTHING = "no exchange"


def python_top_k(state: dict, bucket):
    """As programs write it: what is not among the largest is added to the next gradient."""
    import torch
    import torch.distributed as dist

    values = bucket.buffer()
    residual = state.setdefault(bucket.index(), torch.zeros_like(values))
    if residual.numel() == values.numel():
        values += residual
    k = int(DENSITY * values.numel()) + 1
    indices = torch.topk(values.abs(), k, sorted=False).indices
    sent = values[indices]
    state[bucket.index()] = values.clone()
    state[bucket.index()][indices] = 0
    ranks = dist.get_world_size()
    all_indices = [torch.empty(k, dtype=torch.int32) for _ in range(ranks)]
    all_values = [torch.empty(k) for _ in range(ranks)]
    dist.all_gather(all_indices, indices.int())
    dist.all_gather(all_values, sent)
    values.zero_()
    for of_indices, of_values in zip(all_indices, all_values, strict=True):
        values.index_add_(0, of_indices, of_values, alpha=1 / ranks)
    future = torch.futures.Future()
    future.set_result(values)
    return future


def nothing(_state, bucket):
    import torch

    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def make(mode: str):
    """A model with its hook, and what its gradients are made of."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    import reef

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = torch.nn.ParameterList(torch.zeros(SIDE, SIDE) for _ in range(MATRICES))

        def forward(self, gradient: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.dot(p.view(-1), gradient.view(-1)) for p in self.all]).sum()

    # Of several buckets torch's PowerSGD waits for itself over gloo.
    by_torch = {"bucket_cap_mb": ONE_BUCKET_MIB} if mode == PAIRS["powersgd"] else {}
    model = DistributedDataParallel(Net(), **by_torch)
    if mode == NOTHING:
        model.register_comm_hook(None, nothing)
    elif mode == "top-k in Python":
        model.register_comm_hook({}, python_top_k)
    elif mode == PAIRS["powersgd"]:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        how = {"rank": RANK} if mode == "powersgd" else {"density": DENSITY}
        model.reef_hook = reef.ddp_hook(model, compression=reef.Compression(mode, **how))
    return model


def run_rank() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    gradient = torch.randn(SIDE, SIDE)
    found = {}
    for ours, theirs in PAIRS.items():
        models = {mode: make(mode) for mode in (ours, theirs, NOTHING)}
        seconds: dict[str, list[float]] = {mode: [] for mode in models}
        for round_number in range(ROUNDS + 3):  # torch lays its buckets out anew, and begins to compress, in the first three
            for mode, model in models.items():
                model.zero_grad()
                loss = model(gradient)
                dist.barrier()
                begin = time.perf_counter()
                loss.backward()
                took = torch.tensor([time.perf_counter() - begin])
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if round_number >= 3:
                    seconds[mode].append(took.item())
        found[ours] = {mode: statistics.median(each) for mode, each in seconds.items()}
        found[ours]["low and high"] = [[min(each), max(each)] for each in seconds.values()]
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


def run(ranks: int, link: str | None) -> dict[str, dict]:
    """What rank 0 has found."""
    command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}

    def wait(prefixes: list[list[str]], **where: str) -> dict[str, dict]:
        started = [subprocess.Popen([*prefix, *command], env={**common, **where, "RANK": str(rank), "LOCAL_RANK": "0"},
                                    stdout=subprocess.PIPE, text=True) for rank, prefix in enumerate(prefixes)]  # fmt: skip
        printed = "".join(rank.communicate(timeout=1800)[0] for rank in started)
        return next(json.loads(line[7:]) for line in printed.splitlines() if line.startswith("RESULT "))

    if link is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return wait([[]] * ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    from compress_link_bench import hosts

    with hosts(ranks, link) as names:
        return wait([["ip", "netns", "exec", name] for name in names], MASTER_ADDR="10.79.0.1", MASTER_PORT="29500",
                    GLOO_SOCKET_IFNAME="cable")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", help="a rate of tc's, as 1gbit; without it over loopback")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        for ours, found in run(ranks, arguments.link).items():
            theirs, least = PAIRS[ours], found[NOTHING]
            exchange = (found[theirs] - least) / (found[ours] - least)
            spread = "; ".join(f"{low:.3g} to {high:.3g} s" for low, high in found["low and high"])
            context = (f"times as fast as {theirs}: {found[ours]:.3g} s and {found[theirs]:.3g} s a pass, {exchange:.3g} times without the "
                       f"{least:.3g} s that it takes with a hook that sends nothing; {ROUNDS} rounds, {spread}")  # fmt: skip
            name = f"{arguments.link or 'loopback'}, {ranks} ranks, {MATRICES * SIDE * SIDE} float32/reef.ddp_hook {ours}"
            print(json.dumps({"name": name, "value": found[theirs] / found[ours], "unit": "x", "context": context}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        run_rank()
    else:
        main()
