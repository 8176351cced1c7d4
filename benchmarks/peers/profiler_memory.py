"""The same questions put to torch.profiler with profile_memory=True, the peer that PyTorch ships: what it adds to an
operator, and to a training step. JSON lines as in benchmarks/harness.h."""

import json
import statistics
import time

import torch


def in_turn(plain, profiled, rounds, work):
    """Median of the differences between the two, run in turn, in seconds per unit of work."""
    differences = []
    for turn in range(rounds + 1):
        seconds = []
        for run in (plain, profiled):
            begin = time.perf_counter()
            run()
            seconds.append((time.perf_counter() - begin) / work)
        if turn > 0:
            differences.append(seconds[1] - seconds[0])
    return statistics.median(differences)


def under_profiler(run):
    def wrapped():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
            run()

    return wrapped


def report(name, seconds, scale, unit):
    context = "median of differences to plain in the same round, start and stop of the profiler included"
    print(json.dumps({"name": name, "value": round(seconds * scale, 3), "unit": unit, "context": context}), flush=True)


def main():
    torch.set_num_threads(1)
    t = torch.zeros(1)

    @torch.no_grad()
    def operators():
        for _ in range(20_000):
            t.add_(1)

    report("peer torch.profiler/operator (aten::add_, one element) added",
           in_turn(operators, under_profiler(operators), 5, 20_000), 1e9, "ns")

    net = torch.nn.Sequential(*(m for _ in range(10) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    x = torch.randn(64, 256)

    def steps():
        for _ in range(10):
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            optimizer.step()

    report("peer torch.profiler/training step (MLP of 10 x 256, batch 64, AdamW) added",
           in_turn(steps, under_profiler(steps), 5, 10), 1e6, "us")


if __name__ == "__main__":
    main()
