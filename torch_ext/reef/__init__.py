"""Reef: training inside a memory budget, for LibTorch and PyTorch.

What C++ users reach through ``reef::reef`` is here under the same names; both run the same code.
"""

from ._library import BuildInfo, build_info, cmake_dir, include_dir
from .budget import (
    Budget,
    BudgetError,
    BudgetOutlook,
    BudgetUse,
    Tier,
    TierUse,
    budget,
    disk_tier,
    host_tier,
    pin,
    pinned_tier,
    unpin,
)
from .bytes import format_bytes, parse_bytes
from .collectives import all_reduce, barrier, broadcast
from .ledger import CATEGORIES, Ledger, Peak, Timeline, allocator_live_bytes, category_scope
from .numerics import count_nonfinite
from .process_group import Rendezvous, init_process_group, resolve_rendezvous

__version__: str = build_info().version

__all__ = [
    "CATEGORIES",
    "Budget",
    "BudgetError",
    "BudgetOutlook",
    "BudgetUse",
    "BuildInfo",
    "Ledger",
    "Peak",
    "Rendezvous",
    "Tier",
    "TierUse",
    "Timeline",
    "all_reduce",
    "allocator_live_bytes",
    "barrier",
    "broadcast",
    "budget",
    "build_info",
    "category_scope",
    "cmake_dir",
    "count_nonfinite",
    "disk_tier",
    "format_bytes",
    "host_tier",
    "include_dir",
    "init_process_group",
    "parse_bytes",
    "pin",
    "pinned_tier",
    "resolve_rendezvous",
    "unpin",
]
