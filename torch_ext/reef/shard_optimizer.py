"""Which optimizers can step parts of parameters."""

from __future__ import annotations

import functools
import re
import weakref
from typing import Any

import torch

from .part import part_of

# In the names of classes, here and in other libraries: what they do to an element depends on others of its parameter.
_NOT_BY_ELEMENT = re.compile(
    "adafactor|adalomo|^came|^dion|galore|kron|lamb(?!da)|lars|lbfgs|muon|novograd|psgd|shampoo|sm3|soap", re.IGNORECASE
)
_by_element: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose states have been found to be."""


def refuse_whole_rules(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises ValueError for an optimizer that treats parts as if they were whole parameters, which its name says, or what it
    keeps: called before each step, it finds that before the second."""
    why = _named(type(optimizer))
    if why is None and optimizer in _by_element:
        return
    parts = [p for group in optimizer.param_groups for p in group["params"] if part_of(p) is not None]
    if why is None:
        kept = ((p, key, value) for p in parts for key, value in optimizer.state.get(p, {}).items())
        why = next((f"it keeps {key} of shape {_shape(value)}" for p, key, value in kept if not _fits(p, key, value)), None)
    if parts and why is not None:
        raise ValueError(
            f"{type(optimizer).__name__} was given parts of parameters that reef.shard divides, and needs whole ones ({why}): "
            'take an optimizer that steps each element by itself (SGD, Adam and their like), or stage "replicate"'
        )
    if optimizer.state:
        _by_element.add(optimizer)


def rule_of(optimizer: torch.optim.Optimizer) -> str:
    """The class that it is, or is derived from, of torch's or reef's: "torch.optim.AdamW"; "" for others."""
    for base in type(optimizer).__mro__:
        library = next((name for name in ("torch.optim.", "reef.optim.") if f"{base.__module__}.".startswith(name)), None)
        if library is not None:
            return "" if base is torch.optim.Optimizer else library + base.__name__
    return ""


@functools.cache
def _named(kind: type) -> str | None:
    if kind.__module__.startswith("reef.optim"):
        return None  # each rule refuses what it cannot step, in its own words
    return next((f"it is {base.__name__}" for base in kind.__mro__ if _NOT_BY_ELEMENT.search(base.__name__)), None)


def _fits(part: torch.Tensor, key: str, value: Any) -> bool:
    """Whether it is by element, or one for all elements."""
    if not isinstance(value, torch.Tensor):
        return not (isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value))
    codes = value.dim() == 1 and (value.dtype == torch.uint8 or key.endswith("_scale"))
    return value.dim() == 0 or value.shape == part.shape or codes or part.numel() == 0


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else "a list"
