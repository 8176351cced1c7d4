"""What a training step does with its pages, plans for swapping them, and what a plan costs: pure data, nothing runs."""

from __future__ import annotations

import dataclasses
import math

import torch

SWAP_POLICIES: tuple[str, ...] = tuple(torch.ops.reef.swap_policies())
"""Rules for making a plan: ``"recency"`` and ``"farthest"`` are what a budget does at first and once a step is known;
the others are those of published systems, for comparison."""


@dataclasses.dataclass(frozen=True)
class TracePage:
    """The memory behind one storage."""

    bytes: int
    persistent: bool = False
    """Alive from step to step (a parameter); otherwise made and freed within the step."""


@dataclasses.dataclass(frozen=True)
class TraceOperator:
    """One outermost operator; all its pages must be in memory together while it runs."""

    name: str
    seconds: float
    accesses: dict[int, bool]
    """Page, by number, and whether it is written."""
    frees: tuple[int, ...] = ()
    """Pages that die when it has run."""
    scratch_bytes: int = 0
    """Allocated and freed while it ran, on top of its pages."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one training step did with its pages, which are numbered from 0. The step repeats: what follows its last
    operator is its first. ``Budget.trace()`` gives that of a running program."""

    pages: tuple[TracePage, ...]
    operators: tuple[TraceOperator, ...]

    def check(self) -> None:
        """Raises ValueError, naming the operator, if a page is used before it is written, after it was freed, and so on."""
        _native(self).check()

    @property
    def minimum_bytes(self) -> int:
        """The largest working set: no smaller budget lets the step run."""
        return _native(self).minimum_bytes()

    @property
    def natural_peak_bytes(self) -> int:
        """The most that is alive when nothing ever leaves: with this budget nothing moves."""
        return _native(self).natural_peak_bytes()


@dataclasses.dataclass(frozen=True)
class SwapMove:
    """A page leaves, or comes back."""

    page: int
    kind: str
    """``"evict"`` or ``"fetch"``."""


@dataclasses.dataclass(frozen=True)
class SwapPlan:
    """Which pages move when. A move that cannot be made is passed over."""

    demand: str
    """Which page leaves when room is wanted and the plan has left none: ``"recency"`` or ``"farthest"``."""
    after: tuple[tuple[SwapMove, ...], ...] = ()
    """Of each operator, what starts to move when it has run, in order."""


@dataclasses.dataclass(frozen=True)
class SwapSpeeds:
    """How fast pages move, one lane out and one lane in."""

    out_bytes_per_second: float = math.inf
    in_bytes_per_second: float = math.inf


@dataclasses.dataclass(frozen=True)
class SwapCost:
    """What one step costs when the step before it was the same."""

    faults: int
    """Pages that an operator had to wait for."""
    fetches: int
    """Pages brought back ahead of their use."""
    evictions: int
    bytes_in: int
    bytes_out: int
    """Of pages whose copy outside was stale; a clean page leaves free."""
    peak_bytes: int
    """Pages, scratch, and pages on their way."""
    seconds: float
    stalled_seconds: float
    """Of these, waiting for pages or for room."""


def plan_swaps(
    trace: Trace, budget_bytes: int, policy: str = "farthest", speeds: SwapSpeeds | None = None
) -> SwapPlan:
    """The plan of ``policy`` for a step that repeats. Raises ValueError if the budget is below ``trace.minimum_bytes`` or
    the trace is not sound."""
    plan = _native(trace).plan(budget_bytes, policy, *_speeds(speeds))
    after = tuple(
        tuple(SwapMove(abs(n) - 1, "fetch" if n > 0 else "evict") for n in moves) for moves in plan.after()
    )
    return SwapPlan(plan.demand(), after)


def simulate(trace: Trace, plan: SwapPlan, budget_bytes: int, speeds: SwapSpeeds | None = None) -> SwapCost:
    """The price of ``plan``. Raises as ``plan_swaps`` does."""
    moves = [[_number(move) for move in moves] for moves in plan.after]
    native = torch.classes.reef.SwapPlan(plan.demand, moves)
    counts, seconds, stalled_seconds = _native(trace).simulate(native, budget_bytes, *_speeds(speeds))
    return SwapCost(*counts, seconds, stalled_seconds)


def _number(move: SwapMove) -> int:
    if move.kind not in ("evict", "fetch"):
        raise ValueError(f"a move of kind '{move.kind}'; use evict or fetch")
    return move.page + 1 if move.kind == "fetch" else -(move.page + 1)


def _speeds(speeds: SwapSpeeds | None) -> tuple[float, float]:
    speeds = speeds or SwapSpeeds()
    return speeds.out_bytes_per_second, speeds.in_bytes_per_second


def _native(trace: Trace) -> torch.ScriptObject:
    native = torch.classes.reef.SwapTrace()
    for page in trace.pages:
        native.add_page(page.bytes, page.persistent)
    for op in trace.operators:
        pages, writes = list(op.accesses), list(op.accesses.values())
        native.add_operator(op.name, op.seconds, op.scratch_bytes, pages, writes, list(op.frees))
    return native


def _trace(native: torch.ScriptObject) -> Trace:
    operators = []
    for index in range(native.operators()):
        name, seconds, scratch_bytes, pages, writes, frees = native.operator_at(index)
        accesses = dict(zip(pages, writes, strict=True))
        operators.append(TraceOperator(name, seconds, accesses, tuple(frees), scratch_bytes))
    return Trace(tuple(TracePage(*page) for page in native.pages()), tuple(operators))
