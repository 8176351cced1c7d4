"""Stages that run one after another, and are run again in backward as a schedule says."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable

import torch

from ._carried import Carried
from ._function import modules_of, number_of
from .bytes import _bytes
from .schedule import ChainProfile, Schedule, ScheduleCost
from .tier import Tier, TierSpeed

Stage = Callable[[torch.Tensor], torch.Tensor]


class Chain:
    """Stages, each of one tensor, on the output of the one before: a ``torch.nn.Sequential``, or callables. What a stage does
    inside, and what it captures, is its own business; it must compute the same when it is run again, as for
    ``checkpoint``. A module that stands at several places is a stage at each."""

    def __init__(self, stages: torch.nn.Sequential | Iterable[Stage]) -> None:
        self._places = _places(stages)
        self._of = weakref.ref(stages) if isinstance(stages, torch.nn.Sequential) else None
        self._chain = _chain_of(self._places, gradients=True)

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
        self._check_current()
        return ChainProfile.from_json(torch.ops.reef.profile_chain(self._chain, x, repeats))

    def run(
        self, schedule: Schedule, x: torch.Tensor, *, check_values: bool = False, tier: Tier | None = None
    ) -> torch.Tensor:
        """All stages on ``x``, in whose backward pass they are run again as ``schedule`` says, and whose outputs and tapes leave
        for ``tier`` meanwhile, if it says so. Gradients are bit for bit those of the plain call. Raises ValueError if the
        schedule is not legal for this chain, or needs a tier, or if the Sequential has other layers by now."""
        self._check_current()
        chain = _chain_of(self._places, gradients=True)  # of this run: it knows what its stages have found
        chain.join_to(self._chain.parts())
        return torch.ops.reef.run_chain(chain, schedule.json(), x, check_values, tier and tier._tier)

    def _check_current(self) -> None:
        modules = None if self._of is None else self._of()
        if modules is None:
            return
        now = list(modules._modules.values())
        if len(now) != len(self._places) or any(a is not b for a, (_, b) in zip(now, self._places, strict=True)):
            raise ValueError("Chain: the Sequential that it was made of has other layers now; make a Chain of it once more")


def _places(stages: torch.nn.Sequential | Chain | Iterable[Stage]) -> list[tuple[str, Stage]]:
    if isinstance(stages, Chain):
        stages._check_current()
        return stages._places
    if not isinstance(stages, torch.nn.Sequential):
        return [(str(index), stage) for index, stage in enumerate(stages)]
    hooks = (stages._forward_hooks, stages._forward_pre_hooks, stages._backward_hooks, stages._backward_pre_hooks)
    has_own = type(stages).forward is not torch.nn.Sequential.forward or "forward" in stages.__dict__
    if has_own or any(hooks):
        raise ValueError(
            f"{type(stages).__name__} has {'a forward' if has_own else 'hooks'} of its own, which a chain of its layers would leave "
            "out; give a plain Sequential, or a list of callables that do what it does"
        )
    return list(stages._modules.items())  # named_children() gives a module once


def _chain_of(places: list[tuple[str, Stage]], gradients: bool):
    chain = torch.classes.reef.Chain()
    for name, stage in places:
        chain.add(name, number_of(lambda x, stage=Carried(stage): [stage(x)]), _state_of(stage, gradients))
    return chain


_serials: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_next_serial = itertools.count()


def _state_of(stage: Stage, gradients: bool) -> str:
    """What the stage's costs depend on besides its input, as far as modules are found in it: which they are, whether they
    train, and of their parameters and buffers shapes, dtypes, devices, and what requires a gradient; with ``gradients``,
    and has one."""
    words = []
    for outer in modules_of(stage):
        for module in outer.modules():
            if module not in _serials:
                _serials[module] = next(_next_serial)
            words.append(f"#{_serials[module]}{'t' if module.training else 'e'}")
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    grows = tensor.requires_grad and tensor.is_leaf
                    mark = "." if not tensor.requires_grad else "+" if gradients and grows and tensor.grad is not None else "-"
                    words.append(f"{mark}{tensor.dtype}{tensor.device}{tuple(tensor.shape)}")
    return "".join(words)


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """What was chosen for a chain, an input and a budget."""

    profile: ChainProfile
    schedule: Schedule
    text: str
    is_priced: bool = False
    """Its profile is an upper bound, from inputs of other sizes."""

    @property
    def cost(self) -> ScheduleCost:
        return self.schedule.cost(self.profile)

    def __str__(self) -> str:
        return self.text


class PlannedChain:
    """A chain that is profiled and planned for when it meets an input of another shape, dtype or device, and when its stages
    are no longer what they were: a layer replaced, added, taken out, frozen or unfrozen, one that trains or no longer does.
    Inputs of sizes near or between those that it has met are not profiled but priced, by an upper bound of their bytes,
    unless ``price_sizes`` is false; if a run has needed more than it was given, a warning says so, and from then on each
    size is profiled. 64 kinds of stages and inputs are kept, with 64 profiles of each. Of callables that are no modules, modules are found that they are methods of or refer
    to as variables of an enclosing function. ``group``: ranks
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
        price_sizes: bool = True,
    ) -> None:
        boxed = None if group is None else group.boxed()
        self._stages = stages if isinstance(stages, torch.nn.Sequential) else list(stages)
        self._gradients = group is None  # ranks may differ in which they have, and must find the same
        self._planned = torch.classes.reef.PlannedChain(
            solver, slots, repeats, check_values, boxed, tier and tier._tier, list(tier_speed), price_sizes
        )

    def __call__(self, x: torch.Tensor, budget: str | int) -> torch.Tensor:
        """The chain's output, whose forward and backward pass need at most ``budget`` besides what is there before, gradients
        of parameters included where there were none. Raises BudgetError with the smallest budget that would do."""
        return self._run(self._stages, x, budget)

    def plan(self, x: torch.Tensor, budget: str | int) -> ChainPlan:
        """What a call has chosen, or chooses now."""
        return self._plan(self._stages, x, budget)

    def _run(self, stages, x: torch.Tensor, budget: str | int) -> torch.Tensor:
        chain = _chain_of(_places(stages), self._gradients)
        return torch.ops.reef.run_planned_chain(self._planned, chain, x, _bytes(budget))

    def _plan(self, stages, x: torch.Tensor, budget: str | int) -> ChainPlan:
        chain = _chain_of(_places(stages), self._gradients)
        profile, schedule, text, priced = torch.ops.reef.plan_of_chain(self._planned, chain, x, _bytes(budget))
        return ChainPlan(ChainProfile.from_json(profile), Schedule.from_json(schedule), text, priced)


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
    price_sizes: bool = True,
) -> torch.Tensor:
    """``modules(x)`` as a ``PlannedChain`` of the layers that there are now. The first call with such an input and such layers
    profiles the chain, which takes the time of some steps; what it finds is kept as long as the modules live."""
    return _planned_chain(modules, solver, check_values, group, tier, price_sizes)._run(modules, x, budget)


def plan_of(
    modules: torch.nn.Sequential,
    x: torch.Tensor,
    budget: str | int,
    *,
    solver: str = "combined",
    check_values: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    tier: Tier | None = None,
    price_sizes: bool = True,
) -> ChainPlan:
    """What ``checkpoint_sequential`` has chosen, or chooses now."""
    return _planned_chain(modules, solver, check_values, group, tier, price_sizes)._plan(modules, x, budget)


def _planned_chain(modules: torch.nn.Sequential, solver: str, check_values: bool, group, tier, price_sizes: bool) -> PlannedChain:
    # By the first layer: a part of a Sequential, net[:4], is another object each time.
    known = _planned.setdefault(next(iter(modules._modules.values()), modules), {})
    key = (solver, check_values, group, tier, price_sizes)
    if key not in known:  # without stages, which are those that there are at each call
        known[key] = PlannedChain(
            [], solver=solver, check_values=check_values, group=group, tier=tier, price_sizes=price_sizes
        )
    return known[key]
