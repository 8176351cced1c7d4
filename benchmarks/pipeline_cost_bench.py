"""What pipelines keep and what it costs to split backward passes, in bytes that are counted and in ratios of one run: a transformer
block between I and W, the activations of V-Half and V-Min at eight ranks, the prediction of peaks, and the planner's time.
`pipeline_cost_bench.py block` runs one part alone."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import reef
import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LENGTH, WINDOWS = 128, 4, 128, 4
RANKS, MICRO_BATCHES, BLOCKS = 8, 16, 32
REAL_HOPS = (1, 3)
RANK_SCHEDULES = ("1f1b", "zero_bubble", "zbv", "v_half", "v_min", "gpipe")


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [windows, length, width] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def row(name: str, value: float, unit: str, context: str) -> None:
    print(json.dumps({"name": name, "value": value, "unit": unit, "context": context}), flush=True)


def torch_keeps_after_input(block: Block, x: torch.Tensor) -> int:
    """Bytes that torch's split keeps from I to W, as its pipelining does."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    ledger = reef.Ledger()
    x = x.clone().requires_grad_()
    before = sum(ledger.live("cpu").values())
    y = block(x)
    gradient = torch.ones_like(y)
    inputs, groups = stage_backward_input([y], [gradient], [x], block.parameters())
    del y, gradient, inputs
    x.grad = None
    kept = sum(ledger.live("cpu").values()) - before
    stage_backward_weight(block.parameters(), groups)
    return kept


def block() -> None:
    """A transformer block: what I keeps for W, and how long both take."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)), torch.randn(WINDOWS, LENGTH, WIDTH)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    cost = reef.measure_pipeline(model, x, reef.init_process_group(), repeats=15).stages[1]
    tensor = x.numel() * 4
    row("transformer block/kept after F", cost.kept_bytes / tensor, "hidden tensors", f"{WINDOWS} windows of {LENGTH}, width {WIDTH}")
    row("transformer block/kept after I", cost.kept_after_input_bytes / tensor, "hidden tensors", f"{cost.kept_after_input_bytes / cost.kept_bytes:.3f} times those after F")
    peers = torch_keeps_after_input(model[1], x)
    row("transformer block/kept after torch's I", peers / tensor, "hidden tensors", f"Reef keeps {cost.kept_after_input_bytes / peers:.3f} times as much")
    # The first chunk splits nothing, as nobody waits for the gradient of its input: it is a single layer here.
    whole, split = [], []
    pipelines = {}
    for name in ("breadth_first", "zbv"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block())
        pipelines[name] = reef.Pipeline(model, reef.init_process_group(), micro_batches=4, schedule=name, chunks_per_rank=2, cuts=[1])
    batch = x.repeat(4, 1, 1)
    for _ in range(25):
        for name, times in (("breadth_first", whole), ("zbv", split)):
            begin = time.perf_counter()
            pipelines[name].step(batch, lambda y: y.square().mean())
            times.append(time.perf_counter() - begin)
    ratio = statistics.median(b / a for a, b in zip(whole, split, strict=True))
    row("transformer block/F, I and W over F and B", ratio, "ratio", "one rank, two blocks; median of 25 pairs of steps")


def planner() -> None:
    """A chain of 100 stages that differ, over 8 ranks: with any number of bytes, with a part of what that needs, recomputing what does not
    fit, and where chunks may have several ranks."""
    torch.manual_seed(0)
    draws = torch.rand(100, 3).add(0.5).mul(0.01).tolist()
    stages = [reef.PipelineChunkCost(*seconds, output_bytes=1 << 20, kept_bytes=8 << 20, kept_after_input_bytes=8 << 20, gradient_bytes=1 << 20) for seconds in draws]

    def planned(place: str, rank_bytes: list[int], **options: bool) -> reef.PipelinePlan:
        profile = reef.PipelineProfile(stages, links=[reef.Link(0.0001, 1e9)], rank_bytes=rank_bytes)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            plan = reef.plan_pipeline(profile, RANKS, MICRO_BATCHES, **options)
            times.append(time.perf_counter() - begin)
        row(f"planner/100 stages, 8 ranks, 16 micro-batches{place}", statistics.median(times), "s",
            f"median of 5; {plan.schedule.name}, {plan.cost.makespan_seconds:.2f} s")  # fmt: skip
        return plan

    most = max(rank.peak_bytes for rank in planned("", []).cost.ranks)
    for share in (0.5, 0.1, 0.05):
        planned(f", {share:g} of the bytes, recomputing", [int(share * most)] * RANKS, may_recompute=True)
    planned(", chunks on several ranks", [], may_replicate=True)


def run_rank(schedule: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = reef.init_process_group()
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    batch = torch.randn(MICRO_BATCHES, LENGTH, WIDTH)
    profiles = reef.measure_pipeline(model, batch[:1], group, repeats=1, each_link=False, state_bytes_per_byte=0)
    pipeline = reef.Pipeline(model, group, micro_batches=MICRO_BATCHES, schedule=schedule)
    predicted = pipeline.schedule.cost(profiles.cut(pipeline.cuts)).ranks[group.rank()].peak_bytes
    own = sum(parameter.numel() * 4 for parameter in pipeline.parameters())
    del model
    ledger = reef.Ledger()
    ledger.watch(list(pipeline.parameters()))
    pipeline.step(batch, lambda y: y.square().mean())
    for parameter in pipeline.parameters():
        parameter.grad = None
    begin = sum(ledger.live("cpu").values())
    after_forward = []  # without gradients of parameters

    def note(*_: object) -> None:
        gradients = sum(parameter.grad.nbytes for parameter in pipeline.parameters() if parameter.grad is not None)
        after_forward.append(sum(ledger.live("cpu").values()) - begin - gradients)

    for module in pipeline.modules().values():
        module.register_forward_hook(note)
    ledger.reset_peak()
    pipeline.step(batch, lambda y: y.square().mean())
    used = ledger.peak("cpu").total - begin
    print(json.dumps([group.rank(), used - own, predicted - 2 * own, max(after_forward)]), flush=True)  # without gradients


def eight_ranks() -> None:
    """What a step needs above what is there before it, counted by a ledger, and as predicted; and the activations alone, which are
    what is there when a module's forward pass has ended."""
    most, alone = {}, {}
    for schedule in RANK_SCHEDULES:
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", schedule]
        common = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29507", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": "0"}, stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
        printed = [json.loads(next(line for line in rank.communicate(timeout=600)[0].splitlines() if line.startswith("["))) for rank in ranks]
        used = {rank: numbers for rank, *numbers in printed}
        largest, activations = max(peak for peak, _, _ in used.values()), max(kept for _, _, kept in used.values())
        most.setdefault("1f1b", used[0][0])
        alone.setdefault("1f1b", used[0][2])
        ratios = [peak / predicted for peak, predicted, _ in used.values()]
        row(f"8 ranks, 16 micro-batches/{schedule}", largest / 2**20, "MiB on the rank with most",
            f"{largest / most['1f1b']:.3f} times 1F1B's first rank; measured over predicted {min(ratios):.3f} to {max(ratios):.3f}")  # fmt: skip
        row(f"8 ranks, 16 micro-batches/{schedule}, activations", activations / 2**20, "MiB on the rank with most",
            f"{activations / alone['1f1b']:.3f} times 1F1B's first rank")  # fmt: skip


def run_real_rank() -> None:
    """One rank of real_arithmetic(): prints, by schedule, the median seconds of a step, those of the simulation, and the median of those that
    its thread has computed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = reef.init_process_group()
    model = nn.Sequential(*(Block() for _ in range(8)))
    batch = torch.randn(MICRO_BATCHES * WINDOWS, LENGTH, WIDTH)
    profile = reef.measure_pipeline(model, batch[:WINDOWS], group, repeats=15)
    hops = REAL_HOPS if group.size() > 1 else REAL_HOPS[:1]
    pipelines = [reef.Pipeline(model, group, micro_batches=MICRO_BATCHES, schedule="1f1b", hops=[each] * (group.size() - 1)) for each in hops]
    times, computed = [[] for _ in hops], [[] for _ in hops]
    for _ in range(9):
        for number, pipeline in enumerate(pipelines):
            begin, computed_before = time.perf_counter(), time.thread_time()
            pipeline.step(batch, lambda y: y.square().mean())
            times[number].append(time.perf_counter() - begin)
            computed[number].append(time.thread_time() - computed_before)
    print(json.dumps([[statistics.median(times[number]), pipeline.schedule.cost(profile.cut(pipeline.cuts)).makespan_seconds,
                       statistics.median(computed[number])] for number, pipeline in enumerate(pipelines)]), flush=True)  # fmt: skip


def real_arithmetic() -> None:
    """Eight transformer blocks on one rank and on two, each with one thread: the speed-up, and that of the simulation. Two cores that are
    busy are slower than one that is alone, with a pipeline or without, so the one rank is timed alone and beside another that does the same,
    and what ranks compute for is added up. Passes do not all take as long on cores that others use, too: with deeper hops a rank waits less
    for one of the other's that takes longer, which the simulation does not know."""

    def seconds(size: int, beside: int) -> list[list[float]]:
        """By schedule: of a step, those of the simulation, and those that all ranks compute for."""
        command = [sys.executable, str(Path(__file__).resolve()), "--real-rank"]
        common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": "0", "MASTER_PORT": str(29508 + job)}, stdout=subprocess.PIPE, text=True)
                 for job in range(beside) for rank in range(size)]  # fmt: skip
        printed = [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
        return [[took, predicted, sum(of_rank[number][2] for of_rank in printed[:size])] for number, (took, predicted, _) in enumerate(printed[0])]

    shapes = {"alone": (1, 1), "beside another": (1, 2), "two ranks": (2, 1)}
    found = {name: [] for name in shapes}
    for _ in range(5):
        for name, shape in shapes.items():
            found[name].append(seconds(*shape))
    one = [by_schedule[0] for by_schedule in found["alone"]]
    alone = statistics.median(took for took, _, _ in one)
    beside = statistics.median(by_schedule[0][0] for by_schedule in found["beside another"])
    for number, hops in enumerate(REAL_HOPS):
        both = [by_schedule[number] for by_schedule in found["two ranks"]]
        two = statistics.median(took for took, _, _ in both)
        more = statistics.median(b[2] / a[2] for a, b in zip(one, both, strict=True))
        predicted = statistics.median(a[1] / b[1] for a, b in zip(one, both, strict=True))
        row(f"8 transformer blocks/two ranks, hops of {hops}", two, "s",
            f"medians of 5 runs: {alone / two:.3f} times as fast as one rank alone, {beside / two:.3f} times as fast as one beside another; the simulation "
            f"says {predicted:.3f}, of which that is {alone / two / predicted:.3f} and {beside / two / predicted:.3f}; the two compute {more:.3f} times as long for the "
            f"same, without which it would be {more * alone / two / predicted:.3f}")  # fmt: skip


PARTS = {part.__name__: part for part in (block, planner, eight_ranks, real_arithmetic)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2])
    elif sys.argv[1:] == ["--real-rank"]:
        run_real_rank()
    else:
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
