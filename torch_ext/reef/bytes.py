"""Byte counts as people write them."""

from __future__ import annotations

import torch


def parse_bytes(text: str | int) -> int:
    """``"2GiB"`` -> 2147483648. Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (kB, MB, GB, TB)
    powers of 1000. An int is taken as it is. Raises ValueError for anything else."""
    return text if isinstance(text, int) else torch.ops.reef.parse_bytes(text)


def format_bytes(count: int) -> str:
    """1536 -> ``"1.50 KiB"``: three significant digits, binary units; counts under 1 KiB are exact."""
    return torch.ops.reef.format_bytes(count)


def _bytes(size: str | int) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
