"""What all rules share: parameter groups, states, the step, checkpoints."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from reef.ledger import category_scope
from reef.part import part_of

from .check import Kept, check_parameter, check_these, format_for, kept_as
from .options import MASTERS, STATES, check_names, check_nesterov, check_options, name_of
from .restore import check_is_state_dict, restored

if TYPE_CHECKING:
    from .gradient_release import GradientRelease

__all__ = ["MASTERS", "STATES", "NonFiniteGradient", "Optimizer", "Stepped", "name_of"]

_MASTER_DTYPES = {"float32": torch.float32, "split": torch.uint8}


class NonFiniteGradient(FloatingPointError):
    """A gradient held NaN or an infinity; the text names the parameters."""


class Stepped(NamedTuple):
    """Parameters of a group on one device, and how many elements of each one's gradient were not finite, there."""

    group: dict[str, Any]
    indices: list[int]
    nonfinite: torch.Tensor

    def nonfinite_gradients(self) -> list[str]:
        """Waits for the device."""
        counts = zip(self.indices, self.nonfinite.tolist(), strict=True)
        return [f"{name_of(self.group, i)} ({n} elements)" for i, n in counts if n]


class Operands(NamedTuple):
    """Of parameters of a group on one device."""

    given: tuple[Any, ...]
    """What optim_step_ and optim_squares begin with."""
    begins: list[int]
    fresh: dict[torch.Tensor, dict[str, torch.Tensor]]
    """States that begin: they are kept when the step has been taken."""


class Optimizer(torch.optim.Optimizer):
    """What all rules share. A rule gives its name and its options, by torch's keys."""

    _rule: str
    _decoupled = False
    """The parameter decays, not the gradient."""
    _release: GradientRelease | None = None
    _norms: torch.ScriptObject | None = None
    """Adds up norms of parts over the ranks that have the others."""
    _step_supports_amp_scaling = True
    """GradScaler hands over grad_scale and found_inf."""

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, state: str, master: str, min_quantized_numel: int
    ) -> None:
        defaults = {**defaults, "state": state, "master": master, "min_quantized_numel": min_quantized_numel}
        check_options(type(self).__name__, defaults, defaults)
        check_nesterov(type(self).__name__, defaults)
        self._kept: dict[torch.Tensor, Kept] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_kept", {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate", UserWarning)
            super().add_param_group(param_group)  # what it warns of is refused below
        group = self.param_groups[-1]
        try:
            where = self._where(group)
            check_options(where, group, self.defaults)
            check_names(where, group, self.defaults)
            check_nesterov(where, group)
            seen: set[torch.Tensor] = set()
            for index, p in enumerate(group["params"]):
                check_parameter(f"{type(self).__name__}: {name_of(group, index)}", p)
                if p in seen:
                    raise ValueError(
                        f"{type(self).__name__}: {name_of(group, index)} is in the group already; give each parameter once"
                    )
                seen.add(p)
            self._check_exchange(group)
        except BaseException:
            self.param_groups.pop()
            raise

    def _where(self, group: dict[str, Any]) -> str:
        """Of whom a message about the options of a group speaks."""
        name = type(self).__name__
        if len(self.param_groups) == 1:
            return name
        return f"{name}, group {next(i for i, one in enumerate(self.param_groups) if one is group)}"

    def _numbers(self, group: dict[str, Any]) -> list[float]:
        """In the order of OptimHyper; what the rule does not have is 0, as is an lr that is a tensor."""
        beta1, beta2 = group.get("betas", (group.get("momentum", 0.0), group.get("alpha", 0.0)))
        lr = 0.0 if isinstance(group["lr"], torch.Tensor) else group["lr"]
        keys = ("eps", "weight_decay", "dampening", "lr_decay", "trust_coefficient")
        flags = ("amsgrad", "nesterov", "centered", "maximize")
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        named = [*(group.get(key, 0.0) for key in keys), decoupled, *(group.get(flag, False) for flag in flags)]
        return [float(number) for number in (lr, beta1, beta2, *named)]

    def _names(self, numbers: list[float]) -> list[tuple[str, bool]]:
        """The states of a rule with these numbers, and which are signed."""
        found = torch.ops.reef.optim_state_names(self._rule, numbers)
        return [(name.lstrip("+-"), name.startswith("+-")) for name in found]

    def _keep(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        self.state[p].update(state)
        self._kept[p] = kept_as(group, p, self.state[p])

    def _begun(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state with what it lacks for a step."""
        with category_scope("optimizer state"):  # whenever that is: with gradient release, in backward
            begun = dict(state)
            if not state:
                begun["step"] = torch.zeros((), dtype=torch.float32)
            for name, is_signed in self._names(self._numbers(group)):
                if name not in begun:
                    begun[name], scale = self._begin(group, p, is_signed)
                    if scale.numel() > 0:
                        begun[name + "_scale"] = scale
            if not state and (master := _begun_master(group, p)) is not None:
                begun["master"] = master
        return begun

    def _begin(self, group: dict[str, Any], p: torch.Tensor, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a state."""
        return torch.ops.reef.optim_state(p, format_for(group, p), is_signed)

    def _check_group(self, group: dict[str, Any]) -> None:
        where = self._where(group)
        check_options(where, group, self.defaults)
        check_names(where, group, self.defaults)
        self._check_exchange(group)

    def _check_exchange(self, group: dict[str, Any]) -> None:
        """Whether gradients are, or become, the momentum of reef.Compression("one_bit_adam"), and the rule takes that."""
        torch.ops.reef.optim_check_exchange(self._rule, group["state"], self._numbers(group), group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One step of every parameter that has a gradient. Raises NonFiniteGradient, when all have been stepped."""
        if self._release is not None and getattr(self, "grad_scale", None) is not None:
            raise RuntimeError(
                f"{type(self).__name__}: gradients were stepped in backward as GradScaler had scaled them; use one or the "
                "other, and go on from a checkpoint"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slices = [(group, indices) for group in self.param_groups for indices in _slices(group["params"])]
        for group in self.param_groups:
            self._check_group(group)
        for group, indices in slices:
            check_these(self, group, indices, alone=len(slices) == 1)
        squares = self._squares_over_ranks(slices)
        stepped = [self._step_these(group, indices, of) for (group, indices), of in zip(slices, squares, strict=True)]
        if self._release is not None:
            stepped = self._release._end_step() + stepped
        if bad := [text for these in stepped for text in these.nonfinite_gradients()]:
            raise NonFiniteGradient(
                f"{type(self).__name__}: gradients are not finite: {', '.join(bad)}; blocks of 256 elements that hold "
                "such a one, and whole matrices of int4_rank1, have been left as they were"
            )
        return loss

    def _operands(self, group: dict[str, Any], indices: list[int]) -> Operands:
        numbers = self._numbers(group)
        names = [name for name, _ in self._names(numbers)]
        needed = set(names)
        has_masters = group["master"] in _MASTER_DTYPES
        params = [group["params"][index] for index in indices]
        names_of_scales = [name + "_scale" for name in names]
        none = params[0].new_empty(0)
        states, masters, grads, steps, begins = [], [], [], [], []
        fresh: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for position, p in enumerate(params):
            grads.append(_in_layout_of(p))
            state = self.state.get(p) or {}
            if not state or not needed <= state.keys():
                if state:
                    begins.append(position)
                state = fresh[p] = self._begun(group, p, state)
            for name, scale in zip(names, names_of_scales, strict=True):
                states += [state[name], state.get(scale, none)]
            if has_masters:
                masters.append(state.get("master", none))
            steps.append(state["step"])
        lr = group["lr"] if isinstance(group["lr"], torch.Tensor) else None
        given = (self._rule, group["state"], group["master"], params, grads, states, masters, steps, numbers, lr)
        return Operands((*given, getattr(self, "grad_scale", None)), begins, fresh)

    def _squares_over_ranks(self, slices: list[tuple[dict[str, Any], list[int]]]) -> list[torch.Tensor | None]:
        """Of each slice, what a rule of norms makes its trust ratios of, where there are parts. A rank has a row for every
        parameter, the same on all ranks; of those that are whole, a rank's own."""
        rows = {p: row for row, p in enumerate(p for group in self.param_groups for p in group["params"])}
        parts = {p: part for p in rows if (part := part_of(p)) is not None} if self._norms is not None else {}
        if self._norms is None or not parts:
            return [None] * len(slices)  # the step refuses parts without them
        squares = [torch.ops.reef.optim_squares(*self._operands(group, indices).given) for group, indices in slices]
        own = [
            (of[k], rows[p], parts[p])
            for (group, indices), of in zip(slices, squares, strict=True)
            for k, p in enumerate(group["params"][index] for index in indices)
            if p in parts
        ]
        digits = torch.ops.reef.sum_of_squares(torch.zeros(1)).numel()  # of an exact sum, also where there are no elements
        total = torch.zeros(len(rows), 2, digits, dtype=torch.int64)
        for row_here, row, part in own:
            if part.copy == 0:
                total[row] = row_here
        total = self._norms.add_up(total)
        for row_here, row, _ in own:
            row_here.copy_(total[row])
        return squares

    def _step_these(
        self, group: dict[str, Any], indices: list[int], squares: torch.Tensor | None = None
    ) -> Stepped:
        given, begins, fresh = self._operands(group, indices)
        found_inf = getattr(self, "found_inf", None)
        nonfinite = torch.ops.reef.optim_step_(*given, found_inf, begins, squares)
        if fresh and (found_inf is None or found_inf.item() == 0):
            for p, state in fresh.items():
                self._keep(group, p, state)
        return Stepped(group, indices, nonfinite)

    # ---- checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of this class, whatever its formats were, and then is bit for bit where that one was; or one
        of the torch.optim class of the same rule, whose states are put into this one's format. Raises ValueError, and
        changes nothing, for one of another rule, of other shapes, or that lacks what a step needs."""
        if not isinstance(state_dict, Mapping):  # else hooks may make it one
            check_is_state_dict(type(self).__name__, state_dict)
        made: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

        # torch casts states to their parameter's dtype: codes and 32-bit moments must not be.
        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups, states = restored(self, given)
            made.update(states)
            return {**given, "state": {}, "param_groups": groups}

        def put(_: torch.optim.Optimizer) -> None:
            self._kept.clear()
            for group in self.param_groups:
                for p in group["params"]:
                    if p in made:
                        self._keep(group, p, made[p])

        handles = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def torch_state_dict(self) -> dict[str, Any]:
        """A state_dict for the torch.optim class of the same rule: states in float32, Reef's own options left out."""
        packed = self.state_dict()
        groups = [
            {k: v for k, v in group.items() if k not in ("state", "master", "min_quantized_numel")}
            for group in packed["param_groups"]
        ]
        numbers = itertools.chain.from_iterable(group["params"] for group in packed["param_groups"])
        states = {}
        own = ((group, p) for group in self.param_groups for p in group["params"])
        for number, (group, p) in zip(numbers, own, strict=True):
            state = self.state.get(p)
            if not state:
                continue
            states[number] = {"step": state["step"].clone()}
            for name, is_signed in self._names([1.0] * 13):  # all that the rule has, under any options
                if name not in state:
                    continue
                scale = state.get(name + "_scale", p.new_empty(0))
                states[number][name] = torch.ops.reef.optim_decode(
                    state[name], scale, p.detach(), group["state"], is_signed
                )
        return {"state": states, "param_groups": groups}


def _slices(params: list[torch.Tensor]) -> Iterator[list[int]]:
    """What one call steps: on one device, and its working set, of which a budget must hold all."""
    indices: list[int] = []
    device = None
    size = most = 0
    for index, p in enumerate(params):
        if p.grad is None or p.numel() == 0:
            continue
        moves = p.device != device
        if indices and (moves or size + p.nbytes > most):
            yield indices
            indices, size = [], 0
        if moves:
            device = p.device
            most = torch.ops.reef.optim_slice_bytes(device)
        indices.append(index)
        size += p.nbytes
    if indices:
        yield indices


def _in_layout_of(p: torch.Tensor) -> torch.Tensor:
    grad = p.grad
    return grad if grad.stride() == p.stride() else torch.empty_like(p, dtype=grad.dtype).copy_(grad)


def _begun_master(group: dict[str, Any], p: torch.Tensor) -> torch.Tensor | None:
    dtype = _MASTER_DTYPES.get(group["master"])
    if dtype is None or p.dtype == torch.float32:
        return None
    if dtype == torch.float32:
        return p.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
    return torch.full_like(p, 128, dtype=dtype)
