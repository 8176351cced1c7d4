"""What a chain of stages costs, in which order to run it forward, anew and backward, and how that is chosen: pure data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from . import _library  # noqa: F401  (the operators)
from .bytes import _bytes
from .tier import TierSpeed

CHAIN_SOLVERS: tuple[str, ...] = tuple(torch.ops.reef.chain_solvers())
"""``"store_all"`` recomputes nothing; ``"periodic"`` keeps every k-th output, for the fastest k that fits; ``"revolve"`` is the
best for stages that are all alike; ``"dynamic"`` is the best of all schedules that keep what they have stored until it has
been used; ``"exact"`` the best of all, for at most ten stages; ``"offload"`` recomputes nothing, and moves what does not fit to
the profile's tier; ``"combined"`` does both, and without a tier what ``"dynamic"`` does."""


@dataclasses.dataclass(frozen=True)
class StageProfile:
    """One stage. Its tape is what autograd saves in its forward pass; peaks are above what is alive when it begins."""

    name: str
    output_bytes: int
    tape_bytes: int
    """Without the stage's input; with its output, if ``tape_has_output``."""
    tape_has_input: bool
    """Then it keeps that alive besides."""
    tape_has_output: bool
    forward_bytes: int
    """The peak of a forward pass that keeps no tape, output included."""
    taped_bytes: int
    """Of one that does, tape and output included."""
    retape_bytes: int
    """Of one that ends once the tape is whole."""
    backward_bytes: int
    gradient_bytes: int
    """Gradients of parameters that stay when backward is over."""
    forward_seconds: float
    retape_seconds: float
    backward_seconds: float
    spread: float = 0.0
    """Of the measurements: the middle half's width over the median, the largest of the three."""


@dataclasses.dataclass(frozen=True)
class ChainProfile:
    """What each stage of a chain costs."""

    stages: tuple[StageProfile, ...]
    tier_speed: TierSpeed = TierSpeed()
    """See ``Tier.speed``."""
    tier_capacity_bytes: int = 0
    state_bytes: int = 0
    """Of tensors that stages both read and write, as they were before: kept from forward to backward, whatever the schedule.
    Part of every peak."""

    @staticmethod
    def from_json(text: str) -> ChainProfile:
        """What ``json`` has written. Raises ValueError for other texts."""
        torch.ops.reef.chain_profile_table(text)  # says what is wrong with it
        of = json.loads(text)
        stages = tuple(StageProfile(**stage) for stage in of["stages"])
        return ChainProfile(stages, TierSpeed(**of["tier_speed"]), of["tier_capacity_bytes"], of["state_bytes"])

    def json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "tier_speed": self.tier_speed._asdict()})

    def with_tier(self, speed: TierSpeed, capacity_bytes: int = 1 << 62) -> ChainProfile:
        """The same chain, beside a tier."""
        return dataclasses.replace(self, tier_speed=speed, tier_capacity_bytes=capacity_bytes)

    def table(self) -> str:
        """A line a stage, and one of sums."""
        return torch.ops.reef.chain_profile_table(self.json())

    @property
    def minimum_bytes(self) -> int:
        """The least peak of all schedules that keep what they have stored until it has been used."""
        return torch.ops.reef.chain_minimum_bytes(self.json())

    @property
    def natural_peak_bytes(self) -> int:
        """A budget with which nothing is computed twice."""
        return torch.ops.reef.chain_natural_peak_bytes(self.json())


@dataclasses.dataclass(frozen=True)
class ScheduleLoad:
    """What is alive while an operation runs, at its peak."""

    output_bytes: int
    tape_bytes: int
    gradient_bytes: int
    working_bytes: int


@dataclasses.dataclass(frozen=True)
class ScheduleCost:
    """What a step costs, from the chain's input to its gradient."""

    peak_bytes: int
    peak_operation: int
    """The first at which it is reached, from 0."""
    seconds: float
    recomputed_seconds: float
    """Of these, of forward passes after the loss."""
    waited_seconds: float
    """Of these, for transfers."""
    offloaded_bytes: int
    """Copied to the tier."""
    tier_bytes: int
    """The most that is there at once."""
    load: tuple[ScheduleLoad, ...]
    """Of each operation."""
    begin_seconds: tuple[float, ...]
    """Of each operation, from when what it waits for is there; of a copy, as the lane makes it."""
    end_seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """In which order the stages of a chain, from 1, run, and what is kept between. ``F3``: forward; ``T3``: forward, and its
    tape is kept; ``R3``: its tape is made anew; ``L``: the loss; ``B3``: backward; ``-a3``: its output is forgotten; ``-t3``: its
    tape is. ``>a3`` and ``>t3`` begin to be copied to the tier, ``~a3`` and ``~t3`` leave memory once that is done, ``<a3`` and
    ``<t3`` begin to come back."""

    stages: int
    operations: tuple[str, ...]

    @staticmethod
    def from_json(text: str) -> Schedule:
        """What ``json`` has written."""
        of = json.loads(text)
        return Schedule(of["stages"], tuple(of["operations"]))

    def json(self) -> str:
        return json.dumps({"stages": self.stages, "operations": self.operations})

    def __str__(self) -> str:
        return " ".join(self.operations)

    def cost(self, profile: ChainProfile) -> ScheduleCost:
        """Its price. Raises ValueError, naming the operation, if it is not legal or for another number of stages."""
        *counts, loads, begin, end = torch.ops.reef.schedule_cost(profile.json(), self.json())
        return ScheduleCost(*counts, tuple(ScheduleLoad(*load) for load in loads), tuple(begin), tuple(end))

    def save_chart(self, path: str | Path, profile: ChainProfile, budget_bytes: int = 0, title: str = "Schedule") -> None:
        """An SVG: time to the right, bytes alive upward, and below when each stage runs."""
        Path(path).write_text(torch.ops.reef.schedule_chart(profile.json(), self.json(), budget_bytes, title))


def plan_chain(
    profile: ChainProfile, budget: str | int, solver: str = "combined", *, slots: int = 500, threads: int = 0
) -> Schedule:
    """The schedule of ``solver`` whose peak is at most ``budget`` (bytes, or text). Raises BudgetError with the smallest budget
    that would do. ``slots``: into how many parts ``"dynamic"`` and ``"combined"`` cut the budget; sizes are rounded up to them."""
    return Schedule.from_json(torch.ops.reef.plan_chain(profile.json(), _bytes(budget), solver, slots, threads))
