"""A loss whose tokens have one weight, whichever rank has them."""

from __future__ import annotations

import torch
import torch.distributed


def global_mean(
    sum: torch.Tensor, count: int, group: torch.distributed.ProcessGroup, *, reduction: str = "mean"
) -> torch.Tensor:
    """The loss to call backward on where ranks have different numbers of tokens (samples, pixels): ``sum``, this rank's
    loss added up over its ``count`` of them, becomes its share of the mean over those of all ranks. The mean of the ranks'
    means would give a token of a short batch more weight. ``reduction`` is that of the gradients (``shard``). A rank that
    accumulates over several backward passes gives each the count of all of its passes.

        loss = cross_entropy(logits, tokens, reduction="sum")
        reef.global_mean(loss, tokens.numel(), group).backward()

    All ranks call it alike. With ``"sum"`` the gradients are, bit for bit, those of one process that accumulates the ranks'
    sums over the whole count. Raises ValueError on every rank if there is none of them on any."""
    return torch.ops.reef.global_mean(sum, count, group.boxed(), reduction)
