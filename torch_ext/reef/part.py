"""Tensors that are a part of a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """What a tensor is of a larger one, of which others keep the rest: its elements in memory, from ``first`` on."""

    first: int
    whole_elements: int
    copy: int = 0
    """Where several ranks have the same part: which of them this is. Sums over ranks take number 0."""


def set_part(tensor: torch.Tensor, part: Part, whole_shape: Sequence[int] | None = None) -> None:
    """Notes it on the tensor itself: what is detached from it is the same part, and what operators make of it is none.
    Optimizers of reef.optim step a part as they would have stepped it in the whole, bit for bit, if ``first`` is a multiple
    of 256, and refuse what needs the whole. ``whole_shape``: of the whole, if it has other than one dimension. Raises
    ValueError if the elements do not lie in the whole, ``copy`` is negative, or the shape is one of another number of
    elements."""
    torch.ops.reef.set_part(tensor, *part, None if whole_shape is None else list(whole_shape))


def part_of(tensor: torch.Tensor) -> Part | None:
    """None for a tensor that is whole."""
    found = torch.ops.reef.part_of(tensor)
    return Part(*found) if found else None


def whole_shape_of(tensor: torch.Tensor) -> torch.Size:
    """The shape of what the tensor is a part of; of a tensor that is whole its own."""
    return torch.Size(torch.ops.reef.whole_shape_of(tensor))
