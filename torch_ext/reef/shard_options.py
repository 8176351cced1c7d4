"""The options of ``reef.shard``, as the library takes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from . import _library  # noqa: F401  (the operators)
from .bytes import parse_bytes
from .compression import Compression, as_compression

STAGES = ("replicate", "optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class MixedPrecision:
    """Parameters that are computed with in 16 bits, and kept and stepped in float32."""

    parameters: torch.dtype = torch.bfloat16
    """What float32 parameters of the module become, frozen ones too: bfloat16 or float16. Inputs and buffers are left to
    the program."""
    sums: torch.dtype = torch.float32
    """In what gradients are added up, over passes and over ranks, and travel: float32, or what the parameter is, which
    sends half the bytes and rounds after each addition."""


def shard_options(
    *,
    stage: str | int = "replicate",
    bucket_bytes: str | int = "25MiB",
    reduction: str = "mean",
    sum_order: str = "ranks",
    compression: Compression | str = "none",
    allow: Iterable[str] = (),
    resident_bytes: str | int | None = None,
    shard_degree: int = 0,
    buffers: str = "local",
    ignored: Iterable[torch.Tensor] = (),
    mixed_precision: MixedPrecision | torch.dtype | None = None,
    offload: bool = False,
) -> torch.ScriptObject:
    """Raises ValueError for what is none of them, and TypeError for other names."""
    if isinstance(stage, int):
        if not 0 <= stage < len(STAGES):
            raise ValueError(f"reef.shard: stage is {stage}; give 0 to {len(STAGES) - 1}, or one of {', '.join(STAGES)}")
        stage = STAGES[stage]
    if isinstance(mixed_precision, torch.dtype):
        mixed_precision = MixedPrecision(mixed_precision)
    mixed = (mixed_precision.parameters, mixed_precision.sums) if mixed_precision else (None, torch.float32)
    compression = as_compression(compression)
    return torch.ops.reef.shard_options(
        stage, parse_bytes(bucket_bytes), reduction, sum_order, compression.method, *compression._options(), list(allow),
        None if resident_bytes is None else parse_bytes(resident_bytes), shard_degree, buffers, list(ignored), *mixed, offload,
    )  # fmt: skip
