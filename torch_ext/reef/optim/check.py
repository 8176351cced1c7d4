"""What a step asks of parameters and gradients, and of states that were begun before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from reef.part import part_of

from .options import name_of

if TYPE_CHECKING:
    from .optimizer import Optimizer

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Kept(NamedTuple):
    """Whose a state is, and how it is kept: a step of anything else is refused."""

    asked: tuple[Any, ...]
    """What says so, as it is found."""
    kept: tuple[Any, ...]
    """What it comes to."""
    sizes: tuple[Any, ...]
    """Of its tensors, in their order."""

    def __str__(self) -> str:
        return "shape {}, strides {}, {}, {}, states in {}, master weights {}".format(*self.kept)


def format_for(group: dict[str, Any], p: torch.Tensor) -> str:
    """Of its states: small tensors stay in float32, and a part is as large as its whole."""
    part = part_of(p)
    elements = p.numel() if part is None else part.whole_elements
    return group["state"] if elements >= group["min_quantized_numel"] else "float32"


def kept_as(group: dict[str, Any], p: torch.Tensor, state: dict[str, torch.Tensor]) -> Kept:
    strides = tuple(stride if size > 1 else 1 for stride, size in zip(p.stride(), p.shape, strict=True))
    kept = (tuple(p.shape), strides, p.dtype, p.device, format_for(group, p), group["master"])
    return Kept(_asked(group, p), kept, _sizes(state))


def check_parameter(who: str, p: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(p):
        raise ValueError(f"{who} is a {type(p).__name__}; plain parameters are stepped: give it to torch.optim's optimizer")
    if p.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{who} is on {p.device}; parameters on the CPU and on CUDA devices are stepped")
    if p.dtype not in _DTYPES:
        raise ValueError(f"{who} is {p.dtype}; float32, bfloat16 and float16 are stepped")


def check_these(optimizer: Optimizer, group: dict[str, Any], indices: list[int], *, alone: bool) -> None:
    """With check_options, all that can be known before a step: one that is refused has changed nothing. ``alone``:
    nothing else is stepped, and the operator will look at the sizes of states."""
    names = {name for name, _ in optimizer._names(optimizer._numbers(group))}
    for index in indices:
        p = group["params"][index]
        if not _is_sound(p):
            raise ValueError(f"{type(optimizer).__name__}: {name_of(group, index)} {_what_is_wrong(p)}")
        state = optimizer.state.get(p)
        if not state:
            check_parameter(f"{type(optimizer).__name__}: {name_of(group, index)}", p)
            continue
        before = optimizer._kept.get(p)
        if before is None:
            if other := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
                who = f"{type(optimizer).__name__}: {name_of(group, index)}"
                raise ValueError(f"{who} has states that are no tensors: {', '.join(map(str, other))}; make them tensors")
            before = optimizer._kept[p] = kept_as(group, p, state)  # The program made it, or another version of Reef.
        lacks = optimizer._rule != "sgd" and not names <= state.keys()  # whose momentum begins when it is first asked for
        other_sizes = not alone and before.sizes != _sizes(state)
        if before.asked == _asked(group, p) and not lacks and not other_sizes:
            continue
        who = f"{type(optimizer).__name__}: {name_of(group, index)}"
        now = kept_as(group, p, state)
        if before.kept != now.kept:
            raise ValueError(
                f"{who} has a state that was begun for {before}, and is now {now}; build another optimizer for what "
                "was changed, or change it back"
            )
        if other_sizes:
            raise ValueError(f"{who} has a state of other tensors than it had; load the state again, or begin anew")
        if lacks:
            raise ValueError(
                f"{who} has no state {', '.join(sorted(names - state.keys()))}, which an option that was switched on since "
                "its first step needs; switch it on when the optimizer is made, or begin without a state"
            )
    if optimizer._rule == "one_bit_adam" and indices:
        these = [group["params"][index] for index in indices]
        torch.ops.reef.optim_check_given(any(optimizer.state.values()), these, [p.grad for p in these])


def _asked(group: dict[str, Any], p: torch.Tensor) -> tuple[Any, ...]:
    return p.shape, p.stride(), p.dtype, p.device, group["state"], group["master"], group["min_quantized_numel"]


def _is_sound(p: torch.Tensor) -> bool:
    """With its gradient, as far as a step asks."""
    grad = p.grad
    fits = grad.layout is torch.strided and grad.shape == p.shape and grad.dtype in _DTYPES and grad.device == p.device
    return fits and (p.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(p))


def _what_is_wrong(p: torch.Tensor) -> str:
    grad = p.grad
    if grad.layout is not torch.strided:
        return "has a sparse gradient; make its layer dense (sparse=False), or give it to torch.optim.SparseAdam"
    wrong = [f"of shape {tuple(grad.shape)}"] if grad.shape != p.shape else []
    wrong += [f"of {grad.dtype}"] if grad.dtype not in _DTYPES else []
    wrong += [f"on {grad.device}"] if grad.device != p.device else []
    if not wrong:
        return "has gaps in memory, or shares it with itself; make it dense"
    return (
        f"has a gradient {', '.join(wrong)}; clear gradients (zero_grad()) when parameters are changed, and run backward again"
    )


def _sizes(state: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return tuple((value.shape, value.dtype) for value in state.values())
