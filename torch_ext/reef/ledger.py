"""Counts every byte that LibTorch's allocators hand out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from . import _library  # noqa: F401 (it loads the operators)

CATEGORIES: tuple[str, ...] = tuple(torch.ops.reef.category_names())
"""What a block can hold; a block has exactly one category at a time, so the categories sum to the total."""


def _index(category: str) -> int:
    try:
        return CATEGORIES.index(category)
    except ValueError:
        raise ValueError(f"'{category}' is not a category; use one of {', '.join(CATEGORIES)}") from None


def _named(bytes_by_category: list[int]) -> dict[str, int]:
    return dict(zip(CATEGORIES, bytes_by_category, strict=True))


@dataclasses.dataclass(frozen=True)
class Peak:
    """The largest total that was alive at once."""

    bytes: dict[str, int]
    """By category."""
    op: str
    """The operator that was running, such as ``"aten::mm (backward)"``; ``""`` outside any."""

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class Timeline:
    """Every change of the bytes alive between two moments."""

    def __init__(self, recorded: torch.ScriptObject) -> None:
        self._recorded = recorded

    @property
    def devices(self) -> list[str]:
        return self._recorded.devices()

    @property
    def operators(self) -> list[str]:
        return self._recorded.operators()

    @property
    def events(self) -> list[list[int]]:
        """One row a change: nanoseconds, bytes, kind (0 allocate, 1 free, 2 move), category, category moved from,
        index of the operator or -1, index of the device."""
        return self._recorded.events()

    @property
    def counters(self) -> dict[str, list[tuple[int, int]]]:
        """Of a budget, by name (``"bytes away (cpu)"``, ``"bytes moved out (cpu)"``, ``"bytes moved in (cpu)"``): nanoseconds
        and the value from then on."""
        names = self._recorded.counters()
        series: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        for nanoseconds, value, counter in self._recorded.samples():
            series[names[counter]].append((nanoseconds, value))
        return series

    @property
    def events_dropped(self) -> int:
        """Changes that no longer fitted; if not 0, ``events`` and ``counters`` are prefixes."""
        return self._recorded.events_dropped()

    def bytes_after(self, count: int, device: str = "cpu") -> dict[str, int]:
        """Bytes alive by category after the first ``count`` events."""
        return _named(self._recorded.bytes_after(device, count))

    def chart(self, device: str = "cpu", title: str = "Bytes alive", budget_bytes: int = 0) -> str:
        """A self-contained SVG: time to the right, bytes upward, one band per category, the peak marked."""
        return self._recorded.chart(device, title, budget_bytes)

    def trace(self) -> str:
        """Chrome trace format (JSON) with memory counters; opens in Perfetto."""
        return self._recorded.trace()

    def save_chart(
        self, path: str | Path, device: str = "cpu", title: str = "Bytes alive", budget_bytes: int = 0
    ) -> None:
        Path(path).write_text(self.chart(device, title, budget_bytes))

    def save_trace(self, path: str | Path) -> None:
        Path(path).write_text(self.trace())


class Ledger:
    """Counts every byte that LibTorch's allocators hand out, exactly, from its construction on.

    Blocks born before the first Ledger of the process are unknown until ``watch`` or ``mark`` meets them. Several
    ledgers may live at once: what is alive is the process's, peaks and timelines are each ledger's own.
    """

    def __init__(self) -> None:
        self._ledger = torch.classes.reef.Ledger()

    def watch(self, target: torch.nn.Module | torch.optim.Optimizer | Iterable[torch.Tensor]) -> None:
        """A module's parameters and buffers (or the tensors given) become ``"parameter"``; tensors in an optimizer's
        state become ``"optimizer state"`` at the end of each of its steps."""
        if isinstance(target, torch.nn.Module):
            self._ledger.watch([*target.parameters(), *target.buffers()])
        elif isinstance(target, torch.optim.Optimizer):
            self._watch_optimizer(target)
        elif isinstance(target, torch.Tensor):
            self._ledger.watch([target])
        else:
            self._ledger.watch(list(target))

    def _watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        ledger = self._ledger

        def mark_state(stepped: torch.optim.Optimizer, *_: object) -> None:
            ledger.mark(list(_tensors(stepped.state.values())), _index("optimizer state"))

        mark_state(optimizer)
        optimizer.register_step_post_hook(mark_state)

    def mark(self, tensor: torch.Tensor, category: str) -> None:
        """The block behind ``tensor`` is of ``category`` from now on."""
        self._ledger.mark([tensor], _index(category))

    def live(self, device: str | torch.device = "cpu") -> dict[str, int]:
        """Bytes alive now, by category."""
        return _named(self._ledger.live(str(device)))

    def peak(self, device: str | torch.device = "cpu") -> Peak:
        """The largest total since construction or ``reset_peak``."""
        bytes_by_category, op = self._ledger.peak(str(device))
        return Peak(_named(bytes_by_category), op)

    def peak_by_category(self, device: str | torch.device = "cpu") -> dict[str, int]:
        """The largest bytes of each category, each at its own moment."""
        return _named(self._ledger.peak_by_category(str(device)))

    def reset_peak(self) -> None:
        """Peaks begin anew from what is alive now."""
        self._ledger.reset_peak()

    @property
    def devices(self) -> list[str]:
        """Devices on which anything has been alive, CPU first."""
        return self._ledger.devices()

    def start_timeline(self, max_events: int = 1 << 20) -> None:
        """Records every change from now on, at 32 bytes a change, up to ``max_events``."""
        self._ledger.start_timeline(max_events)

    def stop_timeline(self) -> Timeline:
        """Ends the recording and gives it away. Raises ValueError if none is under way."""
        return Timeline(self._ledger.stop_timeline())

    def table(self) -> str:
        """Per device and category: bytes alive, at the peak of the sum, and the category's own peak."""
        return self._ledger.table()


def allocator_live_bytes() -> int:
    """CPU bytes alive by the counting allocator's own count, which knows neither blocks nor categories: equal to the sum
    of ``Ledger.live()``. 0 before the first Ledger."""
    return torch.ops.reef.allocator_live_bytes()


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@contextlib.contextmanager
def category_scope(category: str) -> Iterator[None]:
    """Blocks that this thread allocates inside the ``with`` are born as ``category``."""
    scope = torch.classes.reef.CategoryScope(_index(category))
    try:
        yield
    finally:
        scope.close()
