"""What it costs to exchange gradients by each method, for any number of ranks, also those that are not here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed

from . import _library  # noqa: F401  (the operators)
from .compression import Compression, Scheduled
from .link import Link


@dataclass(frozen=True)
class ExchangeWork:
    """Seconds that a rank works, as they have been measured; 0: not counted."""

    add: float = 0.0
    """For each element of another rank's that it adds up."""
    round: float = 0.0
    """For each element that it rounds, and holds back what that takes."""
    select: float = 0.0
    """For each element among which it takes the largest, and holds back the rest."""
    merge: float = 0.0
    """For each entry that it merges with others."""
    write: float = 0.0
    """For each element of the dense sum that it writes from a few entries."""
    quantize: float = 0.0
    """For each element that becomes a level (``"qsgd"``)."""
    sign: float = 0.0
    """For each element that becomes a sign, the rest held back."""
    unpack: float = 0.0
    """For each level or sign that it adds up."""
    multiply: float = 0.0
    """For each element of a matrix and each rank of a factor that it is multiplied by."""
    rebuild: float = 0.0
    """For each element and rank of the sum, made of two factors, the rest held back."""


@dataclass(frozen=True)
class ExchangePrice:
    """Of one method and all buckets, one after another."""

    method: str
    gives: str
    """``"exact"``, ``"unbiased"``, ``"error_feedback"`` or ``"lossy"``."""
    rounds: int
    """Of messages that wait for each other."""
    messages: int
    """One after another through one rank."""
    sent_bytes: int
    """Of the rank that sends most."""
    all_bytes: int
    """That all ranks send."""
    link_seconds: float
    work_seconds: float

    @property
    def seconds(self) -> float:
        return self.link_seconds + self.work_seconds


@dataclass(frozen=True)
class ExchangePrices:
    """The prices of all methods."""

    link: Link
    elements: int
    ranks: int
    methods: tuple[ExchangePrice, ...]
    """The fastest first."""
    text: str
    """A line a method."""

    def __str__(self) -> str:
        return self.text

    def fastest(self, of: Iterable[str] = ()) -> ExchangePrice:
        """Of these classes; if there are none, of all but ``"lossy"``. Raises ValueError if no method is of them."""
        classes = list(of)
        for each in self.methods:
            if each.gives in classes or (not classes and each.gives != "lossy"):
                return each
        raise ValueError(f"of the classes {', '.join(classes)} there is no method: allow exact, error_feedback, too.")

    def __getitem__(self, method: str) -> ExchangePrice:
        return next(each for each in self.methods if each.method == method)


def _prices(text: str, table: str) -> ExchangePrices:
    of = json.loads(text)
    methods = tuple(ExchangePrice(**each) for each in of["methods"])
    return ExchangePrices(Link(**of["link"]), of["elements"], of["ranks"], methods, table)


def price_exchange(
    link: Link,
    elements: int | Sequence[int],
    *,
    ranks: int,
    divided: bool = False,
    work: ExchangeWork = ExchangeWork(),
    shapes: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]] = (),
    **options: Scheduled,
) -> ExchangePrices:
    """What each method of ``reef.Compression`` takes to exchange float32 gradients of so many elements (or in buckets of so
    many), as Reef sends them over gloo between up to 4096 ranks. ``divided``: a rank needs no more than its slice of the
    sum, at all stages but ``"replicate"``. ``shapes`` are the parameters' (of each bucket, where there are several), without
    which PowerSGD has no price. ``options`` are those of ``reef.Compression``, each for the methods that know it;
    what changes with the steps is what it is in the end.

        print(reef.price_exchange(reef.Link(0.4e-3, 111e6), 25_000_000, ranks=32, density=0.001))

    Times are those of ranks that come together. Raises ValueError for numbers and options that cannot be."""
    buckets = [elements] if isinstance(elements, int) else list(elements)
    of_buckets = [list(shapes)] if isinstance(elements, int) and shapes else list(shapes)
    flat = [list(shape) for of_bucket in of_buckets for shape in of_bucket]
    counts = [len(of_bucket) for of_bucket in of_buckets]
    numbers = [float(each) for each in astuple(work)]
    given = Compression("auto", **options)._options()
    return _prices(*torch.ops.reef.price_exchange(*astuple(link), buckets, ranks, divided, *given, flat, counts, numbers))


def measure_exchange_work(
    group: torch.distributed.ProcessGroup, *, density: float = 0.001, elements: int = 1 << 22
) -> ExchangeWork:
    """Measures what exchanges of gradients cost on the CPU, on all ranks at once: the median of three repetitions on the
    slowest rank, so all ranks get the same. ``density`` is the share of the elements that sparse methods select, ``elements``
    the size of what will be exchanged, which may fit into a cache or not; 2^16 to 2^22 are measured, with 20 bytes of memory
    each. All ranks call it alike. Raises ValueError for a density outside (0, 1] and for less than one element."""
    return ExchangeWork(*torch.ops.reef.measure_exchange_work(group.boxed(), density, elements))
