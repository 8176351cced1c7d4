"""What a message between two ranks costs, and how that is found out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
import torch.distributed

from . import _library  # noqa: F401  (the operators)


@dataclass(frozen=True)
class Link:
    """Between any two ranks, and alike in both directions, which do not disturb each other. A rank sends one message after
    another, and receives one after another: each takes ``message_seconds`` and its bytes over ``bytes_per_second``, and is
    there ``latency_seconds`` after it has been sent, which messages that are under way together share."""

    latency_seconds: float
    bytes_per_second: float
    message_seconds: float = 0.0

    def __str__(self) -> str:
        return torch.ops.reef.link_text(*astuple(self))


@dataclass(frozen=True)
class LinkSample:
    """What was measured: ``rounds`` that wait for each other, in which a rank sends and receives ``messages`` of ``bytes``,
    all rounds together, took ``seconds``."""

    rounds: float
    messages: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class LinkFit:
    """The link that fits ``samples`` best."""

    link: Link
    worst_error: float
    """The largest difference from what was measured, as a share of that."""
    samples: tuple[LinkSample, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def _fit(link: list[float], worst_error: float, samples: list[list[float]], text: str) -> LinkFit:
    return LinkFit(Link(*link), worst_error, tuple(LinkSample(*each) for each in samples), text)


def _numbers(samples: Iterable[LinkSample]) -> list[list[float]]:
    return [[float(number) for number in astuple(each)] for each in samples]


def fit_link(samples: Iterable[LinkSample]) -> LinkFit:
    """The link of the least squares of relative errors, none of whose numbers is negative. Raises ValueError for samples that
    do not tell a bandwidth: too few, all of one size, or so small that larger ones took no longer."""
    return _fit(*torch.ops.reef.fit_link(_numbers(samples)))


def bound_link(samples: Iterable[LinkSample]) -> LinkFit:
    """What samples say however noisy they are, as noise only adds time: no more latency than the fastest round took, at least
    the bandwidth of the fastest sample, and no time for each message. For samples of which :func:`fit_link` tells no
    bandwidth. Raises ValueError where there are none."""
    return _fit(*torch.ops.reef.bound_link(_numbers(samples)))


def measure_link(group: torch.distributed.ProcessGroup) -> LinkFit:
    """What messages between the ranks of a group cost, over gloo, as exchanges of gradients send them: ten sizes, one
    message after another and four together, of the slowest rank, so all ranks get the same. A rank sends 24 MiB. All ranks
    call it alike, when nothing else uses the network. Where noise hides the bandwidth, it measures up to five times, and
    gives bounds (:func:`bound_link`) where that did not help.

        print(reef.measure_link(group))

    Raises ValueError for a group of one rank, which has no link, and where the group has no gloo for the CPU."""
    return _fit(*torch.ops.reef.measure_link(group.boxed()))
