"""Where bytes are kept while they are not in their device's memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from . import _library  # noqa: F401  (the operators)
from .bytes import _bytes

_UNLIMITED = 1 << 62


@dataclasses.dataclass(frozen=True)
class TierUse:
    """What a tier holds and has moved."""

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    written_bytes: int
    read_bytes: int


class TierSpeed(NamedTuple):
    """How a tier copies from and to a device's memory, one copy at a time, the slower way."""

    bytes_per_second: float = 0.0
    """0: there is no tier."""
    work_share: float = 0.0
    """For what share of a copy's time stages wait, as it takes a core that they would use: about 1 for copies within host
    memory, less for a disk's; 0 for a device's own, and where the process may use more cores than torch has threads."""


class Tier:
    """Where the bytes of a page are kept while it is not in memory; made by ``host_tier``, ``pinned_tier`` and ``disk_tier``."""

    def __init__(self, tier: torch.ScriptObject) -> None:
        self._tier = tier

    @property
    def name(self) -> str:
        return self._tier.name()

    def use(self) -> TierUse:
        return TierUse(*self._tier.use())

    def speed(self, device: str | torch.device = "cpu") -> TierSpeed:
        """Measured with 16 MiB from and to the device's memory. For ``ChainProfile.with_tier``."""
        return TierSpeed(*torch.ops.reef.tier_speed(self._tier, str(torch.device(device))))


def host_tier(capacity: str | int = _UNLIMITED) -> Tier:
    """Host memory; ``capacity`` in bytes or as text (``"8GiB"``)."""
    return Tier(torch.ops.reef.host_tier(_bytes(capacity)))


def pinned_tier(capacity: str | int = _UNLIMITED) -> Tier:
    """Page-locked host memory, which a CUDA device copies from and to by itself: the default of its budgets."""
    return Tier(torch.ops.reef.pinned_tier(_bytes(capacity)))


def disk_tier(
    directory: str | Path,
    capacity: str | int = _UNLIMITED,
    *,
    block: str | int = "1MiB",
    threads: int = 4,
    direct: bool = True,
    io: str = "automatic",
) -> Tier:
    """A file in ``directory`` without a name, gone when the process ends. Every ``block`` is hashed when written and
    verified when read, at most ``threads`` at once; ``direct`` goes past the page cache where the file system allows it.
    ``io`` is how blocks are moved: by ``"threads"``, by ``"uring"``, or ``"automatic"``. Raises RuntimeError with the
    reason if the directory cannot hold it, ValueError if there is no io_uring and ``io`` asks for it."""
    return Tier(torch.ops.reef.disk_tier(str(directory), _bytes(capacity), _bytes(block), threads, direct, io))
