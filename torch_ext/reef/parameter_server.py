"""Asynchronous training: ranks that serve parameters, and ranks that work at them, each in its own time."""

from __future__ import annotations

import torch
import torch.distributed

from . import _library  # noqa: F401  (the operators)
from .async_updates import AsyncLog
from .process_group import _boxed


class ParameterServer:
    """One server: a rank of ``group`` that has a slice of the workers' parameters and steps it with what they push. All ranks
    of the group make a ``ParameterServer`` or an ``AsyncWorker`` at the same time; ranks 0 to ``servers`` - 1 are servers. ::

        server = reef.ParameterServer(group, staleness=2)
        server.serve(torch.optim.Adam([server.parameter], lr=1e-3))

    ``rule`` says what becomes of what a worker pushes: ``"plain"`` (Downpour SGD), ``"staleness_aware"`` (the learning rate
    divided by how many steps late it is), ``"delay_compensated"`` (DC-ASGD, with ``compensation`` for lambda) or ``"elastic"`` (EASGD,
    with ``elasticity`` for a; 0: 0.9 / workers). A worker that has pushed more than ``staleness`` times more often than the slowest
    waits when it pulls; 0 is synchronous training, None lets nobody wait.

    A worker that has ended, or has given no sign of life for the group's heartbeat, leaves, with a warning that names it: the others
    go on. A server that is gone is a torch.distributed.DistError on all ranks. Raises ValueError on all ranks if they disagree
    about the options or the parameters."""

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        *,
        servers: int = 1,
        rule: str = "plain",
        staleness: int | None = 0,
        compensation: float = 0.04,
        elasticity: float = 0.0,
    ) -> None:
        self._rule = rule
        self._server = torch.classes.reef.ParameterServer(
            _boxed(group), servers, rule, staleness, compensation, elasticity
        )
        self.parameter: torch.Tensor = self._server.parameter()
        """The slice: float32, one-dimensional, a multiple of 256 elements; for optimizers that treat elements one by one."""

    def serve(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Serves until no worker is left: all have finished, or are gone. ``optimizer`` takes a step each time one is due; rule
        ``"elastic"`` needs none. Raises torch.distributed.DistError if a server is gone, or every worker before it had finished."""
        if (optimizer is None) != (self._rule == "elastic"):
            raise ValueError(
                "ParameterServer.serve: give an optimizer of server.parameter, and none if the rule is elastic, where workers have theirs"
            )
        while (rate := self.next()) is not None:
            assert optimizer is not None
            rates = [group["lr"] for group in optimizer.param_groups]
            if rate != 1.0:
                for group, lr in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = lr * rate
            optimizer.step()
            if rate != 1.0:
                for group, lr in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = lr

    def next(self) -> float | None:
        """What ``serve`` repeats: answers workers until ``parameter`` has the gradient for a step, which the caller takes before
        the next call, with the learning rate times what is returned. None: no worker is left."""
        return self._server.next()

    def log(self) -> AsyncLog:
        """What has been done so far, by which ``replay_async`` does it again."""
        return AsyncLog(self._server.log())

    def removed(self) -> list[tuple[int, str]]:
        """Whom the server has removed: a worker's rank in the group, and why. One that comes back stays here."""
        return [(rank, why) for rank, why in self._server.removed()]


class AsyncWorker:
    """A worker of asynchronous training, with the options of ``ParameterServer``. ::

        with reef.AsyncWorker(model, group, staleness=2) as worker:
            for batch in batches:
                worker.pull()
                loss(model, batch).backward()
                worker.push()

    Parameters that require a gradient are exchanged: float32, dense; at first they are those of the first worker. All calls
    raise torch.distributed.DistError, from then on, if a server is gone."""

    def __init__(
        self,
        module: torch.nn.Module,
        group: torch.distributed.ProcessGroup,
        *,
        servers: int = 1,
        rule: str = "plain",
        staleness: int | None = 0,
        compensation: float = 0.04,
        elasticity: float = 0.0,
    ) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._worker = torch.classes.reef.AsyncWorker(
            [name for name, _ in named],
            [p for _, p in named],
            _boxed(group),
            servers,
            rule,
            staleness,
            compensation,
            elasticity,
        )

    def pull(self) -> None:
        """Writes the servers' present values into the parameters; waits where this worker is more than ``staleness`` pushes
        ahead of the slowest."""
        self._worker.pull()

    def push(self) -> None:
        """Sends the gradients and takes them away (those that are None count as zero), once after each pull. With rule
        ``"elastic"`` it exchanges parameters instead, needs no other pull, and waits as ``pull`` does. Raises ValueError without a
        gradient, and an error that names the parameter if one is NaN or infinite: before anything is sent. Raises
        torch.distributed.DistError if the servers have gone on without this worker, as it gave no sign of life: ``join`` then."""
        self._worker.push()

    def leave(self) -> None:
        """Nobody waits for this worker until it joins again; the servers wait for that."""
        self._worker.leave()

    def join(self) -> None:
        """Comes back, after ``leave`` or after the servers have gone on without it, at the clock of the slowest, or at its own
        if that is higher. ``pull`` comes next."""
        self._worker.join()

    def finish(self) -> None:
        """Nothing more will be pushed. The servers are done when all workers have said so."""
        self._worker.finish()

    def clock(self) -> int:
        """How often this worker has pushed, and more if it has joined later."""
        return self._worker.clock()

    def __enter__(self) -> AsyncWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.finish()
        else:
            del self._worker  # finishes, if the servers are there; what was raised is the program's
