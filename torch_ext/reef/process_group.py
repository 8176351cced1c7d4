"""Bring-up of a c10d process group, by the same rules as ``reef::init_process_group`` in C++."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Where this process stands among the ranks."""

    rank: int
    world_size: int
    local_rank: int
    """Among the ranks of this host: which device to take."""
    source: str
    """"options", "torchrun", "Open MPI", "PMI", "Slurm" or "alone"."""


def resolve_rendezvous(*, rank: int | None = None, world_size: int | None = None, store: str = "") -> Rendezvous:
    """Decides from explicit options or the environment, without opening a socket. Raises ValueError for a half-set
    environment."""
    return Rendezvous(*torch.ops.reef.resolve_rendezvous(rank, world_size, store))


def init_process_group(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: str = "",
    interface: str = "",
    timeout_seconds: float = 300.0,
    heartbeat_seconds: float = 10.0,
) -> torch.distributed.ProcessGroup:
    """Brings up a process group: gloo for CPU tensors, NCCL for CUDA tensors where a device is present. ``store`` is
    ``"tcp://host:port"`` or ``"file:///path"``; what is left out comes from the environment of torchrun, mpirun or
    Slurm. A world of one is the identity. Returns on every rank or raises on every rank (ValueError,
    torch.distributed.DistError). A rank that others wait for and that has given no sign of life for ``heartbeat_seconds``
    (its process stopped, its machine hanging) has failed; at least 1, or 0: only the timeout counts. Needs a store by
    tcp."""
    boxed = torch.ops.reef.init_process_group(rank, world_size, store, interface, timeout_seconds, heartbeat_seconds)
    return torch.distributed.ProcessGroup.unbox(boxed)


def _boxed(group: torch.distributed.ProcessGroup | None) -> torch.ScriptObject:
    """For the library."""
    if group is None:
        raise ValueError(
            "there is no process group: make one with reef.init_process_group; where it comes from reef.subgroup, this "
            "rank is not a member"
        )
    return group.boxed()
