"""Tensors that are a part of a larger one."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Part(NamedTuple):
    """What a tensor is of a larger one, of which others keep the rest: its elements in memory, from ``first`` on."""

    first: int
    whole_elements: int
    copy: int = 0
    """Where several ranks have the same part: which of them this is. Sums over ranks take number 0."""


def set_part(tensor: torch.Tensor, part: Part) -> None:
    """Notes it on the tensor itself: what is detached from it is the same part, and what operators make of it is none.
    Optimizers of reef.optim step a part as they would have stepped it in the whole, bit for bit, if ``first`` is a multiple
    of 256, and refuse what needs the whole. Raises ValueError if the elements do not lie in the whole, or ``copy`` is
    negative."""
    torch.ops.reef.set_part(tensor, *part)


def part_of(tensor: torch.Tensor) -> Part | None:
    """None for a tensor that is whole."""
    found = torch.ops.reef.part_of(tensor)
    return Part(*found) if found else None
