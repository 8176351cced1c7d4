"""Rates for large batches."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LRScheduler


class LinearScaling(LRScheduler):
    """The linear scaling rule with a gradual warm-up (Goyal et al. 2017, 1706.02677, sections 2.1 and 2.2): with ``factor``
    times the batch, the rate that suits one is multiplied by ``factor``, in equal steps over ``warmup_steps``. ``step()`` after
    each step of the optimizer multiplies each group's rate by what is due, so that other schedulers may change it, too
    (``torch.optim.lr_scheduler.ChainedScheduler``).

    Momentum correction (section 3, remark 2): the momentum of torch's and Reef's optimizers has no rate in it
    (u = m u + g, w -= lr u), so a rate that changes counts for all of it at once, and nothing need be corrected. One that has
    (v = m v + lr g, w -= v) multiplies m by ``momentum_factor`` in the next step, and then makes the same steps.

    Raises ValueError for a factor below 1 or that is not finite, and a negative number of steps."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: float, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        if not (math.isfinite(factor) and factor >= 1):
            raise ValueError(f"LinearScaling was given factor {factor}: give how many times the batch is larger, 1 or more.")
        if warmup_steps < 0:
            raise ValueError(f"LinearScaling was given warmup_steps {warmup_steps}: give 0 or more.")
        self.factor = factor
        self.warmup_steps = warmup_steps
        self.momentum_factor = 1.0
        """The last change: the rate over what it was before ``step()``; 1 before the first."""
        super().__init__(optimizer, last_epoch)

    def _scale_at(self, step: int) -> float:
        risen = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return 1 + (self.factor - 1) * risen

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates after ``last_epoch`` steps."""
        if self.last_epoch == 0:
            change = self._scale_at(0)
        else:
            change = self.momentum_factor = self._scale_at(self.last_epoch) / self._scale_at(self.last_epoch - 1)
        return [group["lr"] * change for group in self.optimizer.param_groups]
