"""Rounds of local steps, and outer steps that make one model of them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed

from .compression import Compression, as_compression
from .shard import Shard
from .shard_state import communication_of, held


class LocalUpdates:
    """Training that communicates once in many steps: each rank takes ``local_steps`` steps of its own, of which not a byte is
    sent, and an outer step makes one model of what all of them have learnt. States of the optimizer, gradients and clipping
    stay each rank's. ::

        sharded = reef.shard(model, group)
        optimizer = torch.optim.AdamW(sharded.parameters())
        updates = reef.LocalUpdates(sharded, local_steps=50)
        ...  # the training loop as it was, and after optimizer.step():
        updates.step()
        ...  # before an evaluation, or at the end:
        updates.finish()

    The outer step is one of SGD, with ``outer_lr``, ``outer_momentum`` and ``nesterov``, on the parameters that the
    round has started from; its gradient is the mean over the ranks of what their steps have taken from these, and travels by
    a ``compression``, if one is given. The defaults are DiLoCo's (2311.08105). ``outer_lr=1, outer_momentum=0`` is the mean
    of the parameters (local SGD), bit for bit that of ``Shard.average_parameters``.

    With ``parts`` parameters are cut, in the module's order, into so many parts whose outer steps are spread evenly over the
    round; with ``overlap_steps`` an exchange is begun so many steps before its outer step is applied, and goes on beside
    them; where it is applied a rank keeps ``mixing`` times its own parameters (Streaming DiLoCo, 2501.18512). Results are
    those of one process that takes all ranks' steps, bit for bit, however long messages take.

    Every rank begins with the parameters of rank 0. With ``between_copies``, a group, the ranks of the shard's group train
    together as ever, at any stage, as one copy, and rounds are among the ranks of that group, one of each copy, which have
    the same parts (``names()``); without it, each rank is by itself, at stage ``"replicate"``.

    All ranks make and call it alike. Raises ValueError on all ranks if options differ or cannot be used, and
    torch.distributed.DistError if a rank is gone or has gone on to something else."""

    def __init__(
        self,
        sharded: Shard,
        *,
        local_steps: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        compression: Compression | str = "none",
        parts: int = 1,
        overlap_steps: int = 0,
        mixing: float = 0.0,
        between_copies: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        compression = as_compression(compression)
        made = torch.ops.reef.local_updates(
            sharded._shard, local_steps, outer_lr, outer_momentum, nesterov, compression.method, *compression._options(),
            parts, overlap_steps, mixing, None if between_copies is None else between_copies.boxed(),
        )  # fmt: skip
        self._open: torch.ScriptObject | None = made
        # Not as Python frees it: whoever waits for an exchange then would hold the lock that its end may need.
        self._end = weakref.finalize(self, made.close)

    @property
    def _updates(self) -> torch.ScriptObject:
        if self._open is None:
            raise ValueError("this LocalUpdates has been closed; make another")
        return self._open

    def step(self) -> None:
        """After a step of this rank's optimizer: applies the outer step that is due, and begins the exchange of the next."""
        self._updates.step()

    def finish(self) -> None:
        """Ends the round early: applies what is under way, and takes an outer step of every part that has been stepped since
        its last. All ranks have the same parameters then, and a round begins. Raises ValueError on all ranks if they have
        not taken as many steps."""
        self._updates.finish()

    def begin_round(self) -> None:
        """For a program that has written parameters (``Shard.load_state_dict`` calls it): those of rank 0 begin a round on all
        ranks. Exchanges that are under way are dropped; what the outer optimizer and the compression remember stays."""
        self._updates.begin_round()

    def close(self) -> None:
        """Waits for an exchange that is under way. Backward reduces gradients again. Parameters stay as they are."""
        self._end()
        self._open = None

    @property
    def local_step(self) -> int:
        """Steps since the last round that has begun by itself: by construction, ``finish`` or ``begin_round``."""
        return self._updates.local_step()

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent for outer steps. Waits for an exchange that is under way."""
        return self._updates.sent_bytes()

    def state_dict(self) -> dict[str, Any]:
        """To go on exactly, at any step: this rank's parameters, those of the round's start, momentum, what is held back, what
        is under way (for which it waits), and the step. It shares their memory. The optimizer's state and the buffers are
        saved beside it. Sends nothing."""
        return communication_of(self._updates.state())["communication"]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave to the same rank of as many, after the module's state and the optimizer's. Raises ValueError
        on all ranks, and nothing has changed, if it is anything else, of other options than the outer rate and momentum, or
        if the ranks' are not of one step and round. To go on with another number of ranks, save the module after
        ``finish``."""
        try:
            own = held({"communication": dict(state_dict)})
        except (ValueError, TypeError):
            self._updates.load_state(held({}))  # which is refused on all ranks
            raise
        self._updates.load_state(own)
