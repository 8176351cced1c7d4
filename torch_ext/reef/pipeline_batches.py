"""Batches of a Pipeline, as far as a rank needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = torch.Tensor | Sequence[torch.Tensor] | None


def kind_of(value: Any) -> str:
    """The type's name, with those of what a tuple or list holds."""
    name = type(value).__name__
    return f"{name} of {', '.join(type(each).__name__ for each in value)}" if isinstance(value, (tuple, list)) else name


def batch_tensors(batch: Tensors) -> list[torch.Tensor]:
    """A batch as a list; None is none. Raises TypeError for anything but a tensor or a sequence of tensors."""
    if batch is None:
        return []
    listed = [batch] if isinstance(batch, torch.Tensor) else batch
    if not isinstance(listed, Sequence) or not all(isinstance(each, torch.Tensor) for each in listed):
        raise TypeError(f"Pipeline: a batch is a tensor or a sequence of tensors, and this is {kind_of(batch)}")
    return list(listed)


def rows_of(targets: Sequence[torch.Tensor], micro_batches: int) -> list[Sequence[torch.Tensor]]:
    """The rows of each target, for every micro-batch. Raises TypeError for anything but tensors."""
    for target in targets:
        if not isinstance(target, torch.Tensor):
            raise TypeError(f"Pipeline: a target is a tensor, whose rows go with those of the batch, and this is {kind_of(target)}")
    return [target.tensor_split(micro_batches) for target in targets]


@contextmanager
def first_stage_input(read: Callable[[], list[Any]]) -> Iterator[list[Any]]:
    """What ``read`` returns, for a call that all ranks make and of which only those with the first stage use it. If ``read``
    raises, the call is given an empty list: so it fails on all ranks, instead of on one while others wait for it. Then this
    raises what ``read`` has raised."""
    wrong, values = None, []
    try:
        values = read()
    except Exception as error:
        wrong = error
    try:
        yield values
    except ValueError as error:
        if wrong is not None:
            raise wrong from error
        raise


@dataclass
class _Held:
    inputs: list[torch.Tensor] | None
    targets: list[Sequence[torch.Tensor]]
    """Rows of each, for every micro-batch."""
    left: int
    """Micro-batches whose targets are still wanted."""


@dataclass
class PipelineBatches:
    """Reads batches in their order when the first or the last stage wants one, and holds each until both have had it."""

    batches: Iterable[Sequence[Any]]
    micro_batches: int
    """Of a batch."""
    has_first: bool
    """Whether this rank has the first stage."""
    losses: int
    """Of how many micro-batches of a batch this rank makes the loss."""
    _held: dict[int, _Held] = field(default_factory=dict)
    _read: int = 0

    def __post_init__(self) -> None:
        self._rest = iter(self.batches)

    def inputs(self, number: int) -> list[torch.Tensor]:
        held = self._get(number)
        inputs, held.inputs = held.inputs, None
        self._let_go(number)
        return inputs or []

    def targets(self, number: int, micro_batch: int) -> list[torch.Tensor]:
        held = self._get(number)
        rows = [target[micro_batch] for target in held.targets]
        held.left -= 1
        self._let_go(number)
        return rows

    def _get(self, number: int) -> _Held:
        while self._read <= number:
            try:
                given = next(self._rest)
            except StopIteration:
                raise ValueError(f"Pipeline.train was to read batch {number}, and there were {self._read} batches") from None
            if not isinstance(given, (tuple, list)) or not given:
                raise TypeError(f"Pipeline.train was given a {type(given).__name__} as a batch: give a tuple of it and its targets")
            batch, *targets = given
            inputs = batch_tensors(batch) if self.has_first else None
            rows = rows_of(targets, self.micro_batches) if self.losses else []
            self._held[self._read] = _Held(inputs, rows, self.losses)
            self._read += 1
        return self._held[number]

    def _let_go(self, number: int) -> None:
        if self._held[number].inputs is None and self._held[number].left == 0:
            del self._held[number]
