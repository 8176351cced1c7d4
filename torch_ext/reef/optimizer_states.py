"""State dicts of optimizers that step what a Shard or a Pipeline keeps: whole, or of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .shard_optimizer import refuse_whole_rules, rule_of
from .shard_state import communication_of, dict_of, held, with_names


class OptimizerStates:
    """What is alike for both: ``_states()`` is the library's object, whose ``parameters()`` and ``names()`` optimizers step."""

    def _states(self) -> torch.ScriptObject:
        raise NotImplementedError

    def _wait_for_states(self) -> None:
        """Until nothing that steps beside the program is under way."""

    def _communication(self) -> Any:
        """What is held back of gradients, as data; None, where nothing ever is."""
        return None

    def _load_communication(self, data: Any) -> None:
        pass

    def full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """What the ``state_dict()`` of an optimizer over the module's parameters that require a gradient would be, in the
        module's order, with their ``param_names`` and, with a ``compression``, what each rank holds back of gradients
        (``communication``). As ``full_state_dict``."""
        with self._on_all(_stepping(optimizer)):
            refuse_whole_rules(_stepping(optimizer))
            own = held(self.sharded_optimizer_state_dict(optimizer))
        whole = self._states().full_optimizer_state(own, rank0_only)
        return dict_of(whole, named=True) if whole[0] else {}

    def sharded_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()``, with ``param_names`` and, with a ``compression``, what this rank holds back of
        gradients (``communication``)."""
        self._wait_for_states()
        communication = self._communication()
        return {
            **with_names(optimizer, self._names(), states=True),
            **(communication_of(communication) if communication else {}),
        }

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, *state_dicts: Mapping[str, Any]) -> None:
        """As ``load_state_dict``. One without ``param_names`` (torch's own) has the parameters that require a gradient, in
        the module's order. Of an optimizer of the same rule, by its options and states. What is held back of gradients is
        loaded with it, by any number of ranks; one without ``communication`` begins with nothing held back, and of another
        ``compression`` it is refused."""
        self._load_optimizer_state_dicts(optimizer, state_dicts, communication=True)

    def _load_optimizer_state_dicts(
        self, optimizer: torch.optim.Optimizer, state_dicts: Iterable[Mapping[str, Any]], *, communication: bool
    ) -> None:
        steps = _stepping(optimizer)
        with self._on_all(steps):
            refuse_whole_rules(steps)
            own = held(with_names(optimizer, self._names(), states=False))
            given = [held(dict(each)) for each in state_dicts]
        data = self._states().own_optimizer_state(own, given, rule_of(steps))
        before = {"state": steps.state, "param_groups": steps.param_groups}
        options = [dict(group) for group in optimizer.param_groups]
        held_back = self._communication()
        try:
            with self._on_all():
                found = dict_of(data, named=False)
                found.pop("communication", None)
                optimizer.load_state_dict(found)
                if communication:
                    self._load_communication(data[2])
        except BaseException:
            self._load_communication(held_back)
            steps.__setstate__(before)
            for group, own_options in zip(optimizer.param_groups, options, strict=True):
                group.update(own_options)
            raise

    @contextlib.contextmanager
    def _on_all(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """What is raised on one rank is raised on all, and so are optimizers of different classes."""
        try:
            yield
        except Exception as error:
            self._states().agree(f"{type(error).__name__}: {error}", "")
            raise
        self._states().agree("", "" if optimizer is None else type(optimizer).__qualname__)

    def _names(self) -> dict[int, str]:
        native = self._states()
        return {id(p): name for p, name in zip(native.parameters(), native.names(), strict=True)}


def _stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What steps, where a DelayedUpdate stands before it."""
    return getattr(optimizer, "_optimizer", optimizer)
