"""Where to cut a chain for a pipeline, and which schedule to run it with: pure data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .link import Link
from .pipeline_schedule import PipelineChunkCost, PipelineCost, PipelineCosts, PipelineSchedule, PipelineSkip, _ends, _skips

PIPELINE_OBJECTIVES: tuple[str, ...] = tuple(torch.ops.reef.pipeline_objectives())
"""By what divisions are compared. T are the seconds of a chunk for a micro-batch, forward and backward, on the slowest of its n ranks,
R those in which these add up its gradients, once for a batch, C those of a message to the next chunk, and M is the number of
micro-batches. ``"pipedream"``: the slowest chunk or link, max(T / n, R / M, 2 C); ``"dapple"``: up to a pivot chunk and back, with its
M - 1 repetitions of T / n each, and what of the reductions does not end while chunks before still run backward; ``"pipe_torch"``: the
slowest chunk with its messages, which do not overlap, max((T + 2 C before + 2 C behind) / n); ``"sum_and_max"``:
sum(T + 2 C) + max((M / n - 1) T) + max(R), with M / n rounded up."""


@dataclass(frozen=True)
class PipelineDivision:
    """Where a chain is cut, and how many ranks take each chunk's micro-batches by turns."""

    cuts: tuple[int, ...]
    """The first stage of each chunk but the first."""
    ranks_per_chunk: tuple[int, ...]
    seconds: float
    """The value of the objective by which it was found."""


@dataclass(frozen=True)
class PipelineProfile:
    """A chain of stages, and the ranks that it is cut for."""

    stages: Sequence[PipelineChunkCost]
    """What each stage of the chain costs, as if it were a chunk."""
    speeds: Sequence[float] = ()
    """As in :class:`PipelineCosts`."""
    links: Sequence[Link] = ()
    """As in :class:`PipelineCosts`."""
    rank_bytes: Sequence[int] = ()
    """What each rank may hold at most; empty stands for any number."""
    skips: Sequence[PipelineSkip] = ()
    """What stages give to others besides their outputs: with the numbers of stages in place of chunks."""

    def _numbers(self):
        return PipelineCosts(self.stages, self.speeds, self.links, self.skips)._numbers()

    def cut(self, cuts: Iterable[int], *, recompute: bool | Iterable[tuple[int, int]] = False) -> PipelineCosts:
        """Adds up the stages of each chunk; ``cuts`` are the first stages of all chunks but the first. The first chunk makes no gradient
        of an input, so its I takes no time. ``recompute``: as of ``Pipeline``, all stages or runs of them. Raises ValueError for cuts that are not ascending or not
        within the chain."""
        firsts = list(cuts)
        runs = zip([0, *firsts], [*firsts, len(self.stages)], strict=True) if recompute is True else recompute or ()
        seconds, counts, skips = torch.ops.reef.cut_costs(*self._numbers(), firsts, _ends(runs))
        chunks = tuple(PipelineChunkCost(*of, *more) for of, more in zip(seconds, counts, strict=True))
        return PipelineCosts(chunks, self.speeds, self.links, _skips(skips))

    def best_cuts(
        self, rank_of: Sequence[int], micro_batches: int, count: int = 1, objective: str = "sum_and_max"
    ) -> tuple[tuple[int, ...], ...]:
        """The ``count`` cuts of least ``objective`` (one of ``PIPELINE_OBJECTIVES``) in ascending order of it, or all if there are
        fewer, where chunk c is on rank ``rank_of[c]``. Raises ValueError for fewer stages than chunks."""
        found = torch.ops.reef.best_cuts(objective, *self._numbers(), list(rank_of), micro_batches, count)
        return tuple(tuple(cuts) for cuts in found)

    def best_divisions(
        self, order: Sequence[int], micro_batches: int, count: int = 1, objective: str = "sum_and_max"
    ) -> tuple[PipelineDivision, ...]:
        """The ``count`` divisions of least ``objective``, of any number of chunks, in ascending order of it, or all if there are fewer.
        Chunk 0 has the first ranks of ``order``, and so on, and none has more ranks than there are micro-batches."""
        rows = torch.ops.reef.best_divisions(objective, *self._numbers(), list(order), micro_batches, count)
        return tuple(PipelineDivision(tuple(cuts), tuple(ranks), seconds) for cuts, ranks, seconds in zip(*rows, strict=True))

    def objective_seconds(
        self, cuts: Iterable[int], rank_of: Sequence[int], micro_batches: int, objective: str = "sum_and_max"
    ) -> float:
        """The value of an objective for these cuts."""
        return torch.ops.reef.objective_seconds(objective, *self._numbers(), list(cuts), list(rank_of), micro_batches)


@dataclass(frozen=True)
class PipelinePlan:
    """What was chosen, and what it costs."""

    cuts: tuple[int, ...]
    """The first stage of each chunk but the first."""
    schedule: PipelineSchedule
    """Of an asynchronous one four batches, which ``Pipeline`` makes by itself of its name, ``hops`` and ``cuts``."""
    costs: PipelineCosts
    """Of the chunks."""
    recompute: tuple[tuple[int, int], ...]
    """The runs of stages that are recomputed: for each run its first stage, and the stage behind its last."""
    hops: tuple[int, ...]
    """Of the schedule, if it has hops."""
    text: str

    @property
    def cost(self) -> PipelineCost:
        return self.schedule.cost(self.costs)

    def __str__(self) -> str:
        """A line of sums, and one for each rank."""
        return self.text


def plan_pipeline(
    profile: PipelineProfile,
    ranks: int,
    micro_batches: int,
    *,
    may_split: bool = True,
    may_recompute: bool = False,
    may_replicate: bool = False,
    schedules: Iterable[str] = (),
    cuts: int = 16,
    orders: int = 4,
) -> PipelinePlan:
    """Finds the fastest of many schedules in virtual time that fits into each rank's bytes: all named ones that are synchronous
    and have one direction, at depths up to what hides the links, and greedy ones, each for the best ``cuts`` and, where ranks
    differ, the best ``orders`` of them (more than six, and those of asynchronous schedules, stay in the order that is given). ``may_split``: backward passes, into I and
    W. ``may_recompute`` lets the plan recompute stages on ranks that lack bytes, as few as make each schedule and cut fit.
    ``may_replicate`` lets it give a chunk to several ranks (``ranks_per_chunk``), each of which adds up its own micro-batches' gradients
    first, and to take ``"chimera"`` and ``"dualpipe"``; then there may be more ranks than stages. ``schedules``: names, of which one is
    chosen; asynchronous ones, of which an update is a batch, are not compared with others, and by four batches. Raises BudgetError, which names the
    rank and how many bytes it lacks, if none fits; ValueError for fewer stages than ranks, and schedules that there are not."""
    found, schedule, ends, hops, text = torch.ops.reef.plan_pipeline(
        *profile._numbers(), list(profile.rank_bytes), ranks, micro_batches, may_split, may_recompute, may_replicate,
        list(schedules), cuts, orders,
    )  # fmt: skip
    runs = tuple(zip(ends[::2], ends[1::2], strict=True))
    return PipelinePlan(tuple(found), PipelineSchedule.from_json(schedule), profile.cut(found, recompute=runs), runs, tuple(hops), text)
