"""Asynchronous updates as data: what servers of a run did, runs in virtual time, and runs done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from . import _library  # noqa: F401  (the operators)
from ._function import number_of

ASYNC_RULES = ("plain", "staleness_aware", "delay_compensated", "elastic")


@dataclass(frozen=True)
class AsyncEvent:
    """One thing that a server did."""

    kind: str
    """``"pull"``: the worker was given the parameters after step number ``version``; ``"push"``: came from what it was given
    after step ``version``, ``staleness`` steps ago; ``"leave"``, ``"join"``; ``"clock"``: the worker's clock was set."""
    worker: int
    clock: int
    """How many pushes of the worker came before."""
    version: int
    staleness: int
    seconds: float
    """Since the server began; of a simulation: virtual."""


class AsyncLog:
    """What one server did in a run, in order: with it, the run can be done again, bit for bit. ``text`` is all of it, one line
    for the options and one for each event. Raises ValueError, which names the line, for what is no such text."""

    def __init__(self, text: str) -> None:
        self.text: str = torch.ops.reef.read_async_log(text)

    @property
    def workers(self) -> int:
        return int(self.text.split(" ", 2)[1])

    @cached_property
    def events(self) -> list[AsyncEvent]:
        found = []
        for line in self.text.splitlines()[1:]:
            words = line.split()
            found.append(AsyncEvent(words[0], *(int(word) for word in words[2:9:2]), float(words[10])))
        return found

    def staleness_histogram(self) -> list[int]:
        """How many pushes were so many steps late: element i of i steps."""
        late = [event.staleness for event in self.events if event.kind == "push"]
        return [late.count(steps) for steps in range(max(late, default=-1) + 1)]


def simulate_async(
    workers: int,
    pushes: int,
    *,
    rule: str = "plain",
    staleness: int | None = 0,
    compensation: float = 0.04,
    elasticity: float = 0.0,
    compute: Sequence[float] = (1.0,),
    message: float = 0.01,
    jitter: float = 0.5,
    absences: Sequence[tuple[int, float, float]] = (),
    seed: int = 0,
) -> AsyncLog:
    """The log of one server, with the options of ``ParameterServer``, and ``workers`` workers that push ``pushes`` times each, in virtual time: the same seed gives the
    same log on every machine. Worker i takes ``compute[i % len(compute)]`` seconds from a pull to the push and a message takes
    ``message`` one way, each drawn evenly from its mean times [1 - jitter, 1 + jitter]. An absence is a worker, and from when until
    when it is away: what it was computing is lost."""
    away = [worker for worker, _, _ in absences]
    begin = [float(start) for _, start, _ in absences]
    end = [float(until) for _, _, until in absences]
    return AsyncLog(
        torch.ops.reef.simulate_async(
            workers,
            pushes,
            rule,
            staleness,
            compensation,
            elasticity,
            [float(seconds) for seconds in compute],
            message,
            jitter,
            away,
            begin,
            end,
            seed,
        )
    )


def replay_async(
    logs: Sequence[AsyncLog],
    slices: Sequence[torch.Tensor],
    push: Callable[[int, int, torch.Tensor], torch.Tensor],
    step: Callable[[int, torch.Tensor, torch.Tensor, float], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Does a run again, real or simulated, from the logs of its servers, and returns their slices as they ended. ``slices`` are
    those at the beginning: float32, one-dimensional. ``push(worker, clock, given)`` returns what the worker pushed for its push number
    ``clock``, of all servers' slices in order, which it had been given (rule ``"elastic"``: its own parameters after that);
    ``step(server, slice, gradient, rate)`` returns the slice after a step with the learning rate times ``rate``, and is not
    called for ``"elastic"``. Raises ValueError if the logs are not of one run, or cannot have been."""

    def pushed(numbers: torch.Tensor, given: torch.Tensor) -> list[torch.Tensor]:
        worker, clock = numbers.tolist()
        return [push(worker, clock, given)]

    def stepped(numbers: torch.Tensor, slice_: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        if step is None:
            raise ValueError("replay_async: only the elastic rule needs no step")
        server, rate = numbers.tolist()
        return [step(int(server), slice_, gradient, rate)]

    return torch.ops.reef.replay_async([log.text for log in logs], list(slices), number_of(pushed), number_of(stepped))
