"""What is done before an optimizer steps tensors that stand for parameters, whichever optimizer it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .shard_optimizer import refuse_whole_rules


class Stepped:
    """Tensors that somebody keeps alive, and what is called before an optimizer steps any of them."""

    def __init__(self, before_step: Callable[[torch.optim.Optimizer], object]) -> None:
        self.before_step = before_step
        self._ids: list[int] = []
        weakref.finalize(self, _forget, self._ids).atexit = False

    def take_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """These, in place of those before."""
        _forget(self._ids)
        self._ids.extend(id(tensor) for tensor in tensors)
        _of_tensor.update(dict.fromkeys(self._ids, weakref.ref(self)))
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))

    def end(self) -> None:
        _forget(self._ids)


_of_tensor: dict[int, weakref.ref[Stepped]] = {}
"""By ``id``: a step of other tensors costs no more than that they are looked up."""
_hooks: list[Any] = []  # of all optimizers, from the first tensors on


def _forget(ids: list[int]) -> None:
    for number in ids:
        _of_tensor.pop(number, None)
    ids.clear()


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuses, besides, an optimizer that would treat parts as if they were whole parameters."""
    found = (_of_tensor.get(id(p)) for group in optimizer.param_groups for p in group["params"])
    known = {each for each in found if each is not None}
    for stepped in (each() for each in known):
        if stepped is not None:
            stepped.before_step(optimizer)
    if known:
        refuse_whole_rules(optimizer)
