"""Stepping each parameter in backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .check import check_these
from .optimizer import Optimizer, Stepped, name_of


class GradientRelease:
    """While it is there, a parameter is stepped as soon as backward has its gradient, and the gradient is freed: of all
    gradients, few are there at a time. Parameters and states after ``step()`` are bit for bit what they are without it. ::

        optimizer = reef.optim.AdamW(model.parameters(), lr=1e-3)
        release = reef.optim.GradientRelease(optimizer)
        ...
        loss.backward()  # steps
        optimizer.step()  # steps what backward has not, and reports

    So whatever looks at all gradients before the step (clipping by their norm, reducing them over ranks, GradScaler)
    finds none, and options such as ``lr`` count as they are during backward. Sums of several backward passes are final
    after the last of ``accumulate``; gradients are kept until then. Parameters that need a gradient now are released;
    others, and groups added later, wait for ``step()``. ``remove()`` ends it, as does the end of a ``with`` block.
    """

    def __init__(self, optimizer: Optimizer, accumulate: int = 1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"GradientRelease: {type(optimizer).__name__} is no optimizer of reef.optim")
        if accumulate < 1:
            raise ValueError(
                f"GradientRelease: accumulate is {accumulate}; give the number of backward passes in a step, at least 1"
            )
        if optimizer._release is not None:
            raise ValueError("GradientRelease: the optimizer's gradients are being released already")
        self._optimizer = optimizer
        self._accumulate = accumulate
        self._passes: dict[torch.Tensor, int] = {}
        self._stepped: list[Stepped] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._ready, group, index))
            for group in optimizer.param_groups
            for index, p in enumerate(group["params"])
            if p.requires_grad
        ]
        optimizer._release = self

    def remove(self) -> None:
        """Gradients are kept until ``step()`` again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._optimizer._release is self:
            self._optimizer._release = None

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _ready(self, group: dict[str, Any], index: int, p: torch.Tensor) -> None:
        passes = self._passes.get(p, 0)
        if passes == self._accumulate:
            raise RuntimeError(
                f"GradientRelease: {name_of(group, index)} has been stepped after {passes} backward passes, "
                "and here is another; give the number of passes in a step as accumulate, and call step() after them"
            )
        if passes + 1 == self._accumulate:
            self._optimizer._check_group(group)
            check_these(self._optimizer, group, [index], alone=True)
            with torch.no_grad():
                self._stepped.append(self._optimizer._step_these(group, [index]))
            p.grad = None
        self._passes[p] = passes + 1  # the last: a pass that was refused is none

    def _end_step(self) -> list[Stepped]:
        """What was stepped since the last."""
        self._optimizer.zero_grad()
        self._passes.clear()
        stepped, self._stepped = self._stepped, []
        return stepped
