"""Process groups over some ranks of another."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.distributed

from . import _library  # noqa: F401  (the operators)
from .process_group import _boxed


def subgroup(
    group: torch.distributed.ProcessGroup, ranks: Iterable[int]
) -> torch.distributed.ProcessGroup | None:
    """A process group over some ranks of ``group``, on the same backends, network and timeouts: rank i of it is ``ranks[i]``
    of ``group``. All ranks of ``group`` call this alike; who is not among ``ranks`` gets None. ``group`` is one of
    ``reef.init_process_group``, of this, or of torch.distributed over gloo or NCCL. A rank that is gone is named as in the
    group that ``init_process_group`` made, by its rank there. Raises ValueError on every rank of ``group`` if they disagree
    about the list, or if it is empty, repeats a rank or names one that there is not."""
    wrong = None
    try:
        numbers = [operator.index(rank) for rank in ranks]
    except TypeError as error:
        numbers, wrong = [], error  # the others must hear of it
    try:
        boxed = torch.ops.reef.subgroup(_boxed(group), numbers)
    except ValueError as error:
        raise error from wrong
    return None if boxed is None else torch.distributed.ProcessGroup.unbox(boxed)
