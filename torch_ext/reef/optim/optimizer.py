"""What all rules share: parameter groups, states, the step, checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from reef.ledger import category_scope
from reef.part import part_of, set_part

if TYPE_CHECKING:
    from .gradient_release import GradientRelease

STATES = (
    "float32", "bfloat16", "int8", "int4", "companded8", "int8_compensated", "int4_compensated", "companded8_compensated",
    "int4_rank1",
)  # fmt: skip
MASTERS = ("none", "float32", "split", "stochastic")

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


class Optimizer(torch.optim.Optimizer):
    """What all rules share. A rule gives its name and its options, by torch's keys."""

    _rule: str
    _decoupled = False
    """The parameter decays, not the gradient."""
    _release: GradientRelease | None = None

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        state: str,
        master: str,
        min_quantized_numel: int,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        # foreach and fused ask for less than what is done anyway.
        for flag, asked in (("capturable", capturable), ("differentiable", differentiable)):
            if asked:
                raise ValueError(f"{type(self).__name__}: {flag}=True is not supported; use torch.optim's for it")
        super().__init__(
            params, {**defaults, "state": state, "master": master, "min_quantized_numel": min_quantized_numel}
        )
        self._step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        where = type(self).__name__
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"{where}: a tensor for lr has one element, not {lr.numel()}")
        for key in ("lr", "eps", "weight_decay", "momentum", "alpha", "lr_decay", "initial_accumulator_value"):
            if key in group and not float(group[key]) >= 0:
                raise ValueError(f"{where}: {key} is {group[key]}; give 0 or more")
        for beta in group.get("betas", ()):
            if not 0 <= float(beta) < 1:
                raise ValueError(f"{where}: betas are {tuple(group['betas'])}; give numbers from 0 to below 1")
        if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(f"{where}: nesterov needs a momentum and no dampening")
        if group["state"] not in STATES:
            raise ValueError(f"{where}: state is '{group['state']}'; use one of {', '.join(STATES)}")
        if group["master"] not in MASTERS:
            raise ValueError(f"{where}: master is '{group['master']}'; use one of {', '.join(MASTERS)}")
        for index, p in enumerate(group["params"]):
            if p.device.type not in ("cpu", "cuda", "meta"):
                raise ValueError(
                    f"{where}: {name_of(group, index)} is on {p.device}; parameters on the CPU and on CUDA devices are stepped"
                )
            if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{where}: {name_of(group, index)} is {p.dtype}; float32, bfloat16 and float16 are stepped"
                )

    def _numbers(self, group: dict[str, Any]) -> list[float]:
        """In the order of OptimHyper; what the rule does not have is 0, as is an lr that is a tensor."""
        beta1, beta2 = group.get("betas", (group.get("momentum", 0.0), group.get("alpha", 0.0)))
        lr = 0.0 if isinstance(group["lr"], torch.Tensor) else group["lr"]
        keys = ("eps", "weight_decay", "dampening", "lr_decay", "trust_coefficient")
        flags = ("amsgrad", "nesterov", "centered", "maximize")
        named = [*(group.get(key, 0.0) for key in keys), self._decoupled, *(group.get(flag, False) for flag in flags)]
        return [float(number) for number in (lr, beta1, beta2, *named)]

    def _names(self, numbers: list[float]) -> list[tuple[str, bool]]:
        """The states of a rule with these numbers, and which are signed."""
        found = torch.ops.reef.optim_state_names(self._rule, numbers)
        return [(name.lstrip("+-"), name.startswith("+-")) for name in found]

    def _format(self, group: dict[str, Any], p: torch.Tensor) -> str:
        part = part_of(p)
        elements = p.numel() if part is None else part.whole_elements
        return group["state"] if elements >= group["min_quantized_numel"] else "float32"

    def _same_part(self, values: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """What is rounded by chance in them is rounded as in the whole."""
        if (part := part_of(p)) is not None:
            set_part(values, part)
        return values

    def _begin(self, group: dict[str, Any], p: torch.Tensor) -> None:
        with category_scope("optimizer state"):  # whenever that is: with gradient release, in backward
            self._begin_states(group, p)
            self._begin_master(group, p)

    def _begin_states(self, group: dict[str, Any], p: torch.Tensor) -> None:
        state = self.state[p]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name, is_signed in self._names(self._numbers(group)):
            state[name], scale = torch.ops.reef.optim_state(p, self._format(group, p), is_signed)
            if scale.numel() > 0:
                state[name + "_scale"] = scale

    def _begin_master(self, group: dict[str, Any], p: torch.Tensor) -> None:
        dtype = _MASTER_DTYPES.get(group["master"])
        if dtype is None or p.dtype == torch.float32:
            return
        if dtype == torch.float32:
            self.state[p]["master"] = p.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
        else:
            self.state[p]["master"] = torch.full_like(p, 128, dtype=dtype)

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
        stepped = [
            self._step_these(group, indices) for group in self.param_groups for indices in _slices(group["params"])
        ]
        if self._release is not None:
            stepped = self._release._end_step() + stepped
        if bad := [text for these in stepped for text in these.nonfinite_gradients()]:
            raise NonFiniteGradient(
                f"{type(self).__name__}: gradients are not finite: {', '.join(bad)}; blocks of 256 elements that hold "
                "such a one, and whole matrices of int4_rank1, have been left as they were"
            )
        return loss

    def _step_these(self, group: dict[str, Any], indices: list[int]) -> Stepped:
        numbers = self._numbers(group)
        names = [name for name, _ in self._names(numbers)]
        params = [group["params"][index] for index in indices]
        states, masters, grads = [], [], []
        for index, p in zip(indices, params, strict=True):
            grads.append(_dense_gradient(group, index, p))
            if not self.state[p]:
                self._begin(group, p)
            state = self.state[p]
            for name in names:
                scale = state.get(name + "_scale")
                states += [state[name], p.new_empty(0) if scale is None else scale]
            if group["master"] in _MASTER_DTYPES:
                masters.append(state.get("master", p.new_empty(0)))
        nonfinite = torch.ops.reef.optim_step_(
            self._rule, group["state"], group["master"], params, grads, states, masters,
            [self.state[p]["step"] for p in params], numbers,
            group["lr"] if isinstance(group["lr"], torch.Tensor) else None,
            getattr(self, "grad_scale", None), getattr(self, "found_inf", None),
        )  # fmt: skip
        return Stepped(group, indices, nonfinite)

    # ---- checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of this class, whatever its formats were, and then is bit for bit where that one was; or one
        of the torch.optim class of the same rule, whose states are put into this one's format."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        taken: dict[str, Any] = {}

        # torch casts states to their parameter's dtype: codes and 32-bit moments must not be.
        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            taken.update(given)
            return {**given, "state": {}}

        def put(_: torch.optim.Optimizer) -> None:
            for group, own in zip(self.param_groups, options, strict=True):
                for key, value in own.items():
                    group.setdefault(key, value)
            self._put(taken)

        handles = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _put(self, given: dict[str, Any]) -> None:
        ids = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
        own = ((group, p) for group in self.param_groups for p in group["params"])
        for number, (group, p) in zip(ids, own, strict=True):
            saved = given["state"].get(number)
            if saved:
                self._put_state(group, p, saved)

    def _put_state(self, group: dict[str, Any], p: torch.Tensor, saved: dict[str, Any]) -> None:
        self._begin(group, p)
        state = self.state[p]
        step = saved.get("step", 1.0)  # torch's SGD counts no steps; with a momentum the first is over
        state["step"] = torch.as_tensor(step, dtype=torch.float32).detach().clone().cpu()
        for name, is_signed in self._names(self._numbers(group)):
            value, scale = saved.get(name), saved.get(name + "_scale")
            if value is None:
                continue  # torch's SGD before its first step
            if value.dtype == state[name].dtype and value.shape == state[name].shape:
                state[name].copy_(value)
                if scale is not None:
                    state[name + "_scale"].copy_(scale)
            else:
                like = self._same_part(torch.empty_like(p, dtype=torch.float32).copy_(value), p)
                codes, scales = state[name], state.get(name + "_scale", p.new_empty(0))
                torch.ops.reef.optim_encode.out(
                    like, self._format(group, p), is_signed, codes=codes, scales=scales
                )
        if "master" in saved and "master" in state:
            state["master"].copy_(saved["master"])

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
            for name, is_signed in self._names(self._numbers(group)):
                scale = state.get(name + "_scale", p.new_empty(0))
                states[number][name] = torch.ops.reef.optim_decode(
                    state[name], scale, p.detach(), group["state"], is_signed
                )
        return {"state": states, "param_groups": groups}


def name_of(group: dict[str, Any], index: int) -> str:
    """Of a parameter, for a message."""
    names = group.get("param_names")
    return names[index] if names else f"parameter {index} of shape {tuple(group['params'][index].shape)}"


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


def _dense_gradient(group: dict[str, Any], index: int, p: torch.Tensor) -> torch.Tensor:
    grad = p.grad
    if grad.layout != torch.strided:
        raise ValueError(
            f"{name_of(group, index)} has a sparse gradient; make its layer dense (sparse=False), or give it to "
            "torch.optim.SparseAdam"
        )
    return grad if grad.stride() == p.stride() else torch.empty_like(p, dtype=grad.dtype).copy_(grad)
