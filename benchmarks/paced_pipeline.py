"""One rank of pipeline_bench.py: trains a pipeline whose stages sleep, so ranks share a machine's cores without waiting for them."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import pipelining


@dataclass(frozen=True)
class Job:
    library: str
    """ "reef" or "torch"."""
    schedule: str
    """A name of the library's, or "chosen" by Reef's planner. "1f1b hops": as deep as the links ask for. "1f1b turns": two chunks, each on one half
    of the ranks, which take turns."""
    ranks: int
    micro_batches: int
    forward_seconds: float
    """Of a whole rank, which has two stages, for a micro-batch; its I and its W take as long."""
    message_bytes: int = 4
    link_bytes_per_second: float = 0.0
    """0: links take no time."""
    steps: int = 5
    batches: int = 0
    """Above 0: of one call of train(), instead of a step."""
    workers: int = 1
    """So many pipelines of `ranks` train together: the virtual workers of "hetpipe"."""
    staleness: int = 0
    swing: float = 0.0
    """By what part every other batch takes longer, and the others less: in one half of the workers these, in the other half those."""

    @property
    def stages(self) -> int:
        return 2 * self.ranks


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


class SleepsForWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class PacedStage(torch.nn.Module):
    """Multiplies by a weight, and sleeps: in F, in I, and where the weight's gradient is made, in W. Reef makes that through
    AccumulateGrad, whose hook sleeps; torch, where it splits backward passes, by following the graph to the weight."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.calls = job, 0
        self.seconds = job.forward_seconds / 2
        self.follows = job.library == "torch"
        self.weight = torch.nn.Parameter(torch.ones(1, 1))
        if not self.follows:
            self.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(self.seconds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.job.swing:
            takes_longer = (self.calls // self.job.micro_batches + dist.get_rank()) % 2 == 0
            self.seconds = self.job.forward_seconds / 2 * (1 + self.job.swing * (1 if takes_longer else -1))
            self.calls += 1
        weight = SleepsForWeight.apply(self.weight, self.seconds) if self.follows else self.weight
        return Sleeps.apply(x.reshape(-1, 1).mm(weight).view_as(x), self.seconds)


class EmptyStage(torch.nn.Module):
    """Of a job that sleeps for 0 s: what is left is the runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def stages_of(job: Job) -> list[torch.nn.Module]:
    return [PacedStage(job) if job.forward_seconds else EmptyStage() for _ in range(job.stages)]


def seconds_alone(job: Job) -> float:
    """What one rank's stages take for all micro-batches without a runtime."""
    model = torch.nn.Sequential(*stages_of(job)[:2])
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for part in torch.ones(job.micro_batches, 1).tensor_split(job.micro_batches):
            loss_of(model(part)).backward()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def loss_of(output: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return output[:, :1].sum()


def profile(job: Job):
    """What a stage costs, measured by itself."""
    import reef

    (stage, *_), x = stages_of(job), torch.ones(1, max(1, job.message_bytes // 4), requires_grad=True)
    forward, backward = [], []
    for _ in range(7):
        begin = time.perf_counter()
        y = stage(x)
        middle = time.perf_counter()
        y.backward(torch.ones_like(y))
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
    half = statistics.median(backward) / 2
    cost = reef.PipelineChunkCost(statistics.median(forward), half, half, output_bytes=job.message_bytes)
    links = [reef.Link(0.0, job.link_bytes_per_second)] if job.link_bytes_per_second else []
    return reef.PipelineProfile([cost] * job.stages, links=links)


def shape_of(job: Job) -> dict:
    """Arguments of pipeline_schedule."""
    import reef

    name, *deeper = job.schedule.split()
    twice = ("interleaved", "interleaved_zero_bubble", "breadth_first", "zbv", "v_half", "v_min", "dualpipev")
    shape = dict(ranks=job.ranks, micro_batches=job.micro_batches, chunks_per_rank=2 if name in twice else 1)
    if deeper == ["turns"]:
        shape["ranks_per_chunk"] = [job.ranks - job.ranks // 2, job.ranks // 2]
    elif deeper and job.ranks > 1:
        seconds = job.message_bytes / job.link_bytes_per_second if job.link_bytes_per_second else 0.0
        splits = name == "zero_bubble"
        shape["hops"] = reef.hops_for([seconds] * (job.ranks - 1), job.forward_seconds, 2 * job.forward_seconds, splits=splits)
    return dict(name=name, **shape)


def reefs(job: Job):
    """A function that makes a step, the seconds that are expected of it, those of a rank's work, and what it runs."""
    import reef

    profiles = [profile(job) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(profiles)  # all plan alike
    (whole,) = profiles
    stages = stages_of(job)
    batch = torch.ones(job.micro_batches, max(1, job.message_bytes // 4))
    of_stage = whole.stages[0]
    work = 2 * job.micro_batches * (of_stage.forward_seconds + of_stage.input_seconds + of_stage.weight_seconds)
    if job.schedule == "chosen":
        plan = reef.plan_pipeline(whole, job.ranks, job.micro_batches)
        schedule, cuts = plan.schedule, list(plan.cuts)
    else:
        shape = shape_of(job)
        size = job.stages // (job.ranks * shape["chunks_per_rank"])
        cuts = list(range(size, job.stages, size))
        if "ranks_per_chunk" in shape:
            cuts = [size * shape["ranks_per_chunk"][0]]
        if job.batches:
            pipeline = reef.Pipeline(stages, dist.group.WORLD, micro_batches=job.micro_batches, schedule=shape["name"], hops=shape.get("hops", ()), cuts=cuts,
                                     replicas=job.workers, staleness=job.staleness)  # fmt: skip
            batches = [(batch,)] * job.batches
            expected = pipeline.train_schedule(job.batches).cost(whole.cut(cuts)).makespan_seconds
            return lambda: pipeline.train(batches, loss_of, lambda: None), expected, job.batches * work, shape["name"]
        schedule = reef.pipeline_schedule(**shape)
    pipeline = reef.Pipeline(stages, dist.group.WORLD, schedule=schedule, cuts=cuts)
    return lambda: pipeline.step(batch, loss_of), schedule.cost(whole.cut(cuts)).makespan_seconds, work, schedule.name


def torchs(job: Job):
    kind = pipelining.schedules.get_schedule_class(job.schedule)
    rank, stages = dist.get_rank(), stages_of(job)
    if issubclass(kind, pipelining.schedules.PipelineScheduleSingle):
        module = torch.nn.Sequential(*stages[2 * rank : 2 * rank + 2])
        schedule = kind(pipelining.PipelineStage(module, rank, job.ranks, torch.device("cpu")), job.micro_batches, loss_fn=loss_of)
        has_last = rank == job.ranks - 1
    else:
        numbers = (rank, job.stages - 1 - rank) if job.schedule == "ZBVZeroBubble" else (rank, rank + job.ranks)
        own = [pipelining.PipelineStage(stages[number], number, job.stages, torch.device("cpu")) for number in numbers]
        schedule = kind(own, job.micro_batches, loss_fn=loss_of)
        has_last = job.stages - 1 in numbers
    batch = torch.ones(job.micro_batches, max(1, job.message_bytes // 4))
    given = (batch,) if rank == 0 else ()
    target = {"target": torch.zeros(job.micro_batches, 1)} if has_last else {}
    return lambda: schedule.step(*given, **target, losses=[]), None, 3 * job.micro_batches * job.forward_seconds, job.schedule


def main() -> None:
    job = Job(**json.loads(os.environ["JOB"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step, expected, work, name = (reefs if job.library == "reef" else torchs)(job)
    if not job.forward_seconds:
        work = seconds_alone(job)
    step()
    times = []
    for _ in range(job.steps):
        dist.barrier()
        begin = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(json.dumps([name, statistics.median(times), expected, work]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
