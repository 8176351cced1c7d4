"""Gradients that are not finite, by parameter and rank, where a compression would spread or hide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .numerics import count_nonfinite
from .optim import NonFiniteGradient


@dataclass(frozen=True)
class NonFiniteElements:
    """So many elements of a parameter's gradient that are NaN or infinite."""

    parameter: str
    """The module's name for it."""
    rank: int | None
    """Whose gradient has them; None: no rank's has, and they are in what has come of all: a sum, or a code of 16 bits, has
    overflowed."""
    elements: int

    def __str__(self) -> str:
        where = "in what has come of all ranks" if self.rank is None else f"on rank {self.rank}"
        return f"{self.parameter} {where} ({self.elements} elements)"


def _elements_of(data: tuple[Sequence[str], Sequence[int], Sequence[int]]) -> list[NonFiniteElements]:
    return [NonFiniteElements(name, None if rank < 0 else rank, n) for name, rank, n in zip(*data, strict=True)]


def _refuse_step(optimizer: torch.optim.Optimizer, found: list[NonFiniteElements]) -> None:
    """Of a pass that is void, unless its gradients have been cleared, or a GradScaler has seen that they are NaN. A part
    without elements has a gradient of such a pass, too, so that all ranks raise alike."""
    if not found or getattr(optimizer, "found_inf", None) is not None:
        return
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    if any(grad is not None and (grad.numel() == 0 or count_nonfinite(grad) > 0) for grad in gradients):
        raise NonFiniteGradient(
            f"{type(optimizer).__name__}: gradients are not finite: {'; '.join(map(str, found))}; the step has been left out, and "
            "what compression holds back is what it was before the pass: clear the gradients, and go on with the next batch"
        )
