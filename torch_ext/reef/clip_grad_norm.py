"""Clipping by the norm of gradients that may be divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    group: torch.distributed.ProcessGroup | None = None,
) -> float:
    """Scales the gradients of ``parameters`` so that their joint 2-norm is ``max_norm`` at most, as
    torch.nn.utils.clip_grad_norm_ does; gives the norm that they had. Of parts (see ``part_of``) the norm is that of the
    whole parameters: with a group, all of whose ranks call it alike, a rank that has no part too.

        reef.clip_grad_norm_(sharded.parameters(), 1.0, group)

    Bit for bit the same for any number of ranks, at every stage, and for any number of threads: sums of 256 squares in
    double are added up without rounding. Gradients that are not all finite stay as they are, and the norm is infinite, on
    every rank. Raises ValueError for sparse gradients, integers and complex numbers, and torch.distributed.DistError if a
    rank is gone."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return torch.ops.reef.clip_grad_norm_(given, float(max_norm), None if group is None else group.boxed())
