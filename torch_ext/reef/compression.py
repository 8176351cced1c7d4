"""How gradients are made smaller, to travel: what reef.shard takes as ``compression``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

Scheduled = float | Mapping[int, float]
"""A number, or what it is from which step on: ``{0: 0.25, 100: 0.001}``."""


@dataclass(frozen=True)
class Compression:
    """A method by which gradients travel in fewer bytes, and what it may be told: see docs/compress.md. An option that the
    method does not take is refused; one that is None is the method's default.

        reef.shard(model, group, compression=reef.Compression("gtopk", density={0: 0.25, 100: 0.001}))
    """

    method: str = "none"
    """``"auto"`` (see ``shard``), ``"none"``, ``"bfloat16"``, ``"float16"``, ``"qsgd"``, ``"sign"``, ``"powersgd"``, ``"powersgd_alternating"``,
    ``"topk"``, ``"gtopk"``, ``"gtopk_tree"``, ``"oktopk"``, ``"dgc"`` or ``"one_bit_adam"``."""
    density: Scheduled | None = None
    """The sparse methods: of a bucket's elements, which share a rank sends; by default 0.001."""
    bits: Scheduled | None = None
    """``"qsgd"``: of an element; from 2 to 8, by default 8."""
    entropy_coded: bool | None = None
    """``"qsgd"``: whether levels travel in an entropy code, for the same result in fewer bytes; by default False."""
    rank: Scheduled | None = None
    """``"powersgd"`` and ``"powersgd_alternating"``: of the factors; from 1, by default 4."""
    seed: int | None = None
    """``"qsgd"`` and both of PowerSGD: what chooses the random numbers, the same on all ranks; by default 0."""
    momentum: Scheduled | None = None
    """``"dgc"``: what is left of a rank's momentum in each step; from 0 to less than 1, by default 0.9. The optimizer is to have none."""
    max_norm: Scheduled | None = None
    """``"dgc"``: what a rank gives to a bucket's sum or mean is scaled to a norm of ``max_norm / sqrt(P)`` at most; by default nothing is."""
    warmup_steps: int | None = None
    """``"one_bit_adam"``, which needs it: steps before ranks exchange momentum, 15 to 20 percent of all."""
    beta1: float | None = None
    """``"one_bit_adam"``: of the momentum, and of its ``reef.optim.OneBitAdam``; by default 0.9."""

    def __post_init__(self) -> None:
        torch.ops.reef.check_compression(self.method, *self._options())

    def _options(self) -> tuple[list[str], list[int], list[float]]:
        names: list[str] = []
        steps: list[int] = []
        values: list[float] = []
        for field in fields(self)[1:]:
            given = getattr(self, field.name)
            if given is None:
                continue
            for step, value in sorted(given.items() if isinstance(given, Mapping) else [(0, given)]):
                names.append(field.name)
                steps.append(step)
                values.append(float(value))
        return names, steps, values


def as_compression(given: Compression | str) -> Compression:
    return given if isinstance(given, Compression) else Compression(given)
