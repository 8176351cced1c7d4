"""Data parallel, with more or less of it divided among the ranks, bit for bit alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed

from .bytes import parse_bytes

STAGES = ("replicate", "optimizer", "gradients", "parameters")


class Shard:
    """What the ranks of a group keep of one module; made by ``shard``."""

    def __init__(self, shard: torch.ScriptObject) -> None:
        self._shard = shard

    def parameters(self) -> list[torch.Tensor]:
        """What this rank's optimizer steps. At stage ``"replicate"`` the module's own parameters that require a
        gradient; else this rank's part of each of them, one-dimensional (see ``part_of``), sharing its memory but for stage
        ``"parameters"``. Gradients appear here when backward is over."""
        return self._shard.parameters()

    def names(self) -> list[str]:
        """Of each of these, the module's name for it; of a part ``name[first:last]``."""
        return self._shard.names()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward adds gradients up on this rank and sends nothing. All ranks do so alike."""
        self._shard.begin_no_sync()
        try:
            yield
        finally:
            self._shard.end_no_sync()

    def gather(self) -> None:
        """Makes the module's parameters what the ranks' optimizers have made of their parts. Happens by itself when an
        operator first reads a parameter after a step, so all ranks must do that or this alike. At stage ``"parameters"``
        all of them are in memory then, until operators need others."""
        self._shard.gather()

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent for gradients and parameters."""
        return self._shard.sent_bytes()


def shard(
    module: torch.nn.Module,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    stage: str | int = "replicate",
    bucket_bytes: str | int = "25MiB",
    reduction: str = "mean",
    resident_bytes: str | int = 0,
) -> Shard:
    """Trains an unmodified module on all ranks of ``group`` (by default torch.distributed's own): makes it what it is on
    rank 0, and from now on reduces its gradients during backward. ``stage`` says what is divided among the ranks: nothing
    (``"replicate"``, DDP), the optimizer's states (``"optimizer"``, ZeRO-1), and the gradients (``"gradients"``, ZeRO-2),
    and the parameters (``"parameters"``, ZeRO-3), or 0 to 3. Of the last, so many ``resident_bytes`` may stay gathered. Gradients are added up in the order of ranks, so a step is bit for bit that of one process that accumulates
    over the same micro-batches, and divides by the number of ranks for ``reduction="mean"``.

        group = reef.init_process_group()
        sharded = reef.shard(model, group, stage="optimizer")
        optimizer = torch.optim.AdamW(sharded.parameters())

    Raises ValueError on every rank if the ranks' modules differ (with the first difference), and
    torch.distributed.DistError if a rank is gone."""
    if group is None:
        group = torch.distributed.group.WORLD
        if group is None:
            raise ValueError("reef.shard: there is no process group; make one with reef.init_process_group")
    if isinstance(stage, int):
        if not 0 <= stage < len(STAGES):
            raise ValueError(f"reef.shard: stage is {stage}; give 0 to {len(STAGES) - 1}, or one of {', '.join(STAGES)}")
        stage = STAGES[stage]
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    return Shard(
        torch.ops.reef.shard(
            list(parameters.values()), list(parameters), list(buffers.values()), list(buffers), group.boxed(), stage,
            parse_bytes(bucket_bytes), reduction, parse_bytes(resident_bytes),
        )
    )  # fmt: skip
