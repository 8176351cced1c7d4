"""A step beside the next pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from .shard import Shard


class DelayedUpdate(torch.optim.Optimizer):
    """An optimizer whose step runs beside the next forward and backward pass, on a thread of its own: one-step delayed
    parameter update (ZeRO-Offload, 2101.06840, section 5.2), for a shard whose parts are in host memory. ::

        sharded = reef.shard(model, group, stage="gradients", offload=True)
        optimizer = reef.DelayedUpdate(torch.optim.AdamW(sharded.parameters()), sharded)
        ...  # the training loop as it was, and after it, and before an evaluation:
        optimizer.finish()

    It trains otherwise than without it, exactly so: with p(t) for what step t makes, and p(-1) = p(0), the gradient of
    step t is that at p(t - 2), and p(t) = step(p(t - 1), that gradient). ``finish()`` ends the delay until the next step.
    Options (the learning rate, for a scheduler) are changed here, not in the optimizer that it was made of; what a program
    writes into parameters or states, it writes after ``finish()``. What a step raises is raised by the next one, or by
    ``finish()``. All ranks call ``step()`` and ``finish()`` alike.

    Raises ValueError if the shard's parts are no copies in host memory (``offload``), at stage ``"parameters"``, and if the
    shard has one already; ``close()`` ends it."""

    def __init__(self, optimizer: torch.optim.Optimizer, shard: Shard) -> None:
        self._optimizer = optimizer
        self._update = shard._shard
        self._update.open_update()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reef-delayed-update")
        self._step: Future[None] | None = None
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Begins the step, when the one before has ended."""
        if closure is not None:
            raise ValueError("DelayedUpdate: a step beside the program cannot call a closure; call backward before step()")
        self._wait()
        _copy_options(self.param_groups, self._optimizer.param_groups)
        self._update.begin_update()
        self._step = self._pool.submit(self._run)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of gradients that are no step's."""
        if not self._update.under_way():
            super().zero_grad(set_to_none)

    def finish(self) -> None:
        """Until the step has ended; the module's parameters are the newest then. All ranks alike, before an evaluation,
        and before saving what is to go on exactly."""
        self._wait()
        self._update.finish_update()

    def close(self) -> None:
        """Waits; the shard can be given another then."""
        try:
            self._wait()
        finally:
            self._pool.shutdown()
            self._update.close_update()

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer that it was made of, after its step."""
        self._update.wait_for_update()
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.finish()
        self._optimizer.load_state_dict(state_dict)
        _copy_options(self._optimizer.param_groups, self.param_groups)

    def _run(self) -> None:
        try:
            self._update.wait_for_parts()
            self._optimizer.step()
        finally:
            self._update.end_update()

    def _wait(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.result()


def _copy_options(groups: list[dict[str, Any]], to: list[dict[str, Any]]) -> None:
    for own, other in zip(groups, to, strict=True):
        other.update({key: value for key, value in own.items() if key != "params"})
