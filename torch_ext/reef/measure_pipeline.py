"""What a chain of stages costs, as ``plan_pipeline`` needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed

from ._function import number_of
from .bytes import parse_bytes
from .chain import Chain
from .link import Link
from .pipeline import Maker, _loss_of_outputs, _maker, _stages
from .pipeline_batches import Tensors, batch_tensors
from .pipeline_schedule import PipelineChunkCost, _skips
from .plan_pipeline import PipelineProfile
from .process_group import _boxed


def measure_pipeline(
    stages: torch.nn.Sequential | Chain | Iterable[torch.nn.Module | Maker],
    micro_batch: Tensors,
    group: torch.distributed.ProcessGroup,
    *,
    repeats: int = 5,
    state_bytes_per_byte: float = 2.0,
    rank_bytes: str | int | None = None,
    each_link: bool = True,
    loss: Callable[..., torch.Tensor] | None = None,
) -> PipelineProfile:
    """Measures what each stage takes for a micro-batch like this one, in seconds and bytes, how fast the ranks are, and the links
    between them. The result is the same on all ranks. ::

        profile = reef.measure_pipeline(model, micro_batch, group)
        plan = reef.plan_pipeline(profile, ranks=group.size(), micro_batches=16)
        pipeline = reef.Pipeline(model, group, schedule=plan.schedule, cuts=plan.cuts)

    Stages are given as to ``Pipeline`` and run in their order, a share of them on each rank, and one at a time, so nothing else
    should run meanwhile. Each pass is measured ``repeats`` times, after one that is not counted, and the median counts; backward
    passes in halves, I and W. Bytes are counted by a ``Ledger``; of an optimizer, ``state_bytes_per_byte`` for each byte of a
    parameter that requires a gradient (2 for AdamW). Nothing is trained: parameters, gradients, buffers and random numbers are
    what they were. Speeds are those of products of matrices, one rank after another; ranks that differ by less than a tenth
    count as alike. ``rank_bytes`` is what this rank may hold at most. With ``each_link`` the link of each pair of ranks is
    measured, one after another; else one measurement holds for all.

    With ``loss``, which gives a single number from the last stage's outputs, its passes are measured as part of that stage; else it takes no
    time and keeps nothing.

    All ranks call this alike; ``micro_batch``, a tensor or several, counts on rank 0. Raises what a stage raises, on the others
    torch.distributed.DistError."""
    makers = [number_of(_maker(name, stage, {})) for name, stage in _stages(stages)]
    limit = 0 if rank_bytes is None else parse_bytes(rank_bytes)
    seconds, counts, speeds, links, limits, skips = torch.ops.reef.measure_pipeline(
        makers, batch_tensors(micro_batch), _boxed(group), repeats, state_bytes_per_byte, limit, each_link, _loss_of_outputs(loss)
    )
    costs = tuple(PipelineChunkCost(*of, *more) for of, more in zip(seconds, counts, strict=True))
    return PipelineProfile(costs, tuple(speeds), tuple(Link(*link) for link in links), tuple(limits), _skips(skips))
