"""The batches of Pipeline.train, as far as a rank needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class _Held:
    inputs: list[torch.Tensor] | None
    targets: list[tuple[torch.Tensor, ...]]
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
            inputs = [batch] if isinstance(batch, torch.Tensor) else list(batch)
            rows = [target.tensor_split(self.micro_batches) for target in targets] if self.losses else []
            self._held[self._read] = _Held(inputs if self.has_first else None, rows, self.losses)
            self._read += 1
        return self._held[number]

    def _let_go(self, number: int) -> None:
        if self._held[number].inputs is None and self._held[number].left == 0:
            del self._held[number]
