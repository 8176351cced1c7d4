"""Collectives over lists of tensors, on the group's own backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed

from .process_group import _boxed

_BUCKET_BYTES = 32 << 20


def all_reduce(
    tensors: Sequence[torch.Tensor],
    group: torch.distributed.ProcessGroup,
    reduction: str = "sum",
    bucket_bytes: int = _BUCKET_BYTES,
) -> None:
    """Every rank ends with the elementwise ``"sum"`` or ``"mean"`` over ranks; all pass the same shapes in the same
    order. Memory: one flat buffer per dtype of at most ``bucket_bytes`` (one tensor more, if that is larger). Raises
    torch.distributed.DistError, which names the rank that is gone where that can be told."""
    torch.ops.reef.all_reduce(tensors, _boxed(group), reduction, bucket_bytes)


def broadcast(
    tensors: Sequence[torch.Tensor],
    group: torch.distributed.ProcessGroup,
    root: int = 0,
    bucket_bytes: int = _BUCKET_BYTES,
) -> None:
    """Every rank ends with rank ``root``'s values."""
    torch.ops.reef.broadcast(tensors, _boxed(group), root, bucket_bytes)


def barrier(group: torch.distributed.ProcessGroup) -> None:
    """Returns once every rank has called it."""
    torch.ops.reef.barrier(_boxed(group))
