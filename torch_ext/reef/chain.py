"""Stages that run one after another, and are run again in backward as a schedule says."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable

import torch

from ._function import number_of
from .bytes import _bytes
from .schedule import ChainProfile, Schedule, ScheduleCost
from .tier import Tier, TierSpeed

Stage = Callable[[torch.Tensor], torch.Tensor]


class Chain:
    """Stages, each of one tensor, on the output of the one before: a ``torch.nn.Sequential``, or callables. What a stage does
    inside, and what it captures, is its own business; it must compute the same when it is run again, as for
    ``checkpoint``."""

    def __init__(self, stages: torch.nn.Sequential | Iterable[Stage]) -> None:
        self._chain = torch.classes.reef.Chain()
        named = stages.named_children() if isinstance(stages, torch.nn.Sequential) else enumerate(stages)
        for name, stage in named:
            self._chain.add(str(name), number_of(lambda x, stage=stage: [stage(x)]))

    @property
    def names(self) -> list[str]:
        """Of the stages; of those that have been joined, together."""
        return self._chain.names()

    def __len__(self) -> int:
        return len(self._chain.names())

    def profile(self, x: torch.Tensor, repeats: int = 3) -> ChainProfile:
        """Measures each stage by itself: bytes by the ledger, seconds as the median of ``repeats``. Parameters, gradients,
        buffers and generators are afterwards what they were. A stage that writes into its input, or gives back a part of
        it, is joined to the one before."""
        return ChainProfile.from_json(torch.ops.reef.profile_chain(self._chain, x, repeats))

    def run(
        self, schedule: Schedule, x: torch.Tensor, *, check_values: bool = False, tier: Tier | None = None
    ) -> torch.Tensor:
        """All stages on ``x``, in whose backward pass they are run again as ``schedule`` says, and whose outputs and tapes leave
        for ``tier`` meanwhile, if it says so. Gradients are bit for bit those of the plain call. Raises ValueError if the
        schedule is not legal for this chain, or needs a tier."""
        return torch.ops.reef.run_chain(self._chain, schedule.json(), x, check_values, tier and tier._tier)


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """What was chosen for a chain, an input and a budget."""

    profile: ChainProfile
    schedule: Schedule
    text: str

    @property
    def cost(self) -> ScheduleCost:
        return self.schedule.cost(self.profile)

    def __str__(self) -> str:
        return self.text


class PlannedChain:
    """A chain that is profiled and planned for when it meets an input of another shape, dtype or device. ``group``: ranks
    train together, and all take rank 0's profile. ``tier``: outputs and tapes may also be moved there, where that is faster
    than computing them once more; its speed is measured if it is not given. Stages live as long as this does, whatever they
    refer to: one that refers to what this is kept in keeps both for good."""

    def __init__(
        self,
        stages: torch.nn.Sequential | Iterable[Stage],
        *,
        solver: str = "combined",
        slots: int = 500,
        repeats: int = 3,
        check_values: bool = False,
        group: torch.distributed.ProcessGroup | None = None,
        tier: Tier | None = None,
        tier_speed: TierSpeed = TierSpeed(),
    ) -> None:
        boxed = None if group is None else group.boxed()
        self._planned = torch.classes.reef.PlannedChain(
            Chain(stages)._chain, solver, slots, repeats, check_values, boxed, tier and tier._tier, list(tier_speed)
        )

    def __call__(self, x: torch.Tensor, budget: str | int) -> torch.Tensor:
        """The chain's output, whose forward and backward pass need at most ``budget`` besides what is there before, gradients
        of parameters included where there were none. Raises BudgetError with the smallest budget that would do."""
        return torch.ops.reef.run_planned_chain(self._planned, x, _bytes(budget))

    def plan(self, x: torch.Tensor, budget: str | int) -> ChainPlan:
        """What a call has chosen, or chooses now."""
        profile, schedule, text = torch.ops.reef.plan_of_chain(self._planned, x, _bytes(budget))
        return ChainPlan(ChainProfile.from_json(profile), Schedule.from_json(schedule), text)


_planned: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple, PlannedChain]] = weakref.WeakKeyDictionary()


def checkpoint_sequential(
    modules: torch.nn.Sequential,
    x: torch.Tensor,
    budget: str | int,
    *,
    solver: str = "combined",
    check_values: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    tier: Tier | None = None,
) -> torch.Tensor:
    """``modules(x)`` as a ``PlannedChain``. The first call with such an input profiles the chain, which takes the time of some
    steps; what it finds is kept as long as the modules live."""
    return _planned_chain(modules, solver, check_values, group, tier)(x, budget)


def plan_of(
    modules: torch.nn.Sequential,
    x: torch.Tensor,
    budget: str | int,
    *,
    solver: str = "combined",
    check_values: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    tier: Tier | None = None,
) -> ChainPlan:
    """What ``checkpoint_sequential`` has chosen, or chooses now."""
    return _planned_chain(modules, solver, check_values, group, tier).plan(x, budget)


def _planned_chain(modules: torch.nn.Sequential, solver: str, check_values: bool, group, tier) -> PlannedChain:
    known = _planned.setdefault(modules, {})
    key = (modules.training, solver, check_values, group, tier)
    if key not in known:
        known[key] = PlannedChain(modules, solver=solver, check_values=check_values, group=group, tier=tier)
    return known[key]
