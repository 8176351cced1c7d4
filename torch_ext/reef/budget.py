"""Trains inside a given number of bytes, bit for bit the same."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from .bytes import _bytes
from .ledger import Ledger, _tensors
from .swap import Trace, _trace
from .tier import Tier, disk_tier

BudgetError = torch.OutOfMemoryError
"""What is raised when an operator's working set does not fit; its text says what would do."""


@dataclasses.dataclass(frozen=True)
class BudgetUse:
    """What a budget has done so far."""

    budget_bytes: int
    live_bytes: int
    peak_bytes: int
    """The largest number of bytes alive at once."""
    minimum_bytes: int
    """The largest working set met, with what cannot leave: the least budget that would do."""
    faults: int
    """Pages that an operator had to wait for."""
    fetches: int
    """Pages brought back ahead of their operator."""
    evictions: int
    """Pages that left."""
    clean_evictions: int
    """Of these, without being written: the tier still had them."""
    unseen_writes: int
    """Pages found written although no operator had; nothing is lost."""
    bytes_in: int
    bytes_out: int
    unannounced: int
    """Pages that were touched while away, where addresses stay: without an operator, or by one whose working set exceeds
    the budget."""
    oversized: int
    """Operators whose working set exceeded the budget, and which went on, slowly, where addresses stay."""
    waited_seconds: float
    """Spent on moving pages by the threads that needed them."""
    unannounced_seconds: float
    """Until the pages that were touched while away were back, in all."""


@dataclasses.dataclass(frozen=True)
class BudgetOutlook:
    """What a step would cost with another budget, by simulation of the step that repeats, at the speeds measured."""

    budget_bytes: int
    seconds: float
    waited_seconds: float
    """Of these, for pages."""
    moved_bytes: int
    """In and out."""


Target = torch.nn.Module | torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor]

_in_force: set[Budget] = set()
"""A budget that was started is in force until it is stopped, whether or not the program keeps the object."""


class Budget(contextlib.ContextDecorator):
    """See ``budget``. Also a decorator, and ``start``/``stop``; may be used again after it has ended."""

    def __init__(
        self,
        size: int,
        targets: tuple[object, ...],
        device: str,
        tiers: list[Tier],
        prefetch: bool,
        restore: bool,
        addresses: str,
        strict: bool,
        wait_while_full: bool,
    ) -> None:
        self._size = size
        # Not to keep a model alive that the program has let go of; an iterator is read once.
        self._targets = [weakref.ref(known) for target in targets for known in _owners(target)]
        self._device = device
        self._tiers = tiers
        self._prefetch = prefetch
        self._restore = restore
        self._addresses = addresses
        self._strict = strict
        self._wait_while_full = wait_while_full
        self._budget: torch.ScriptObject | None = None
        self._ended: tuple[BudgetUse, str] | None = None
        self._ledger: Ledger | None = None

    def start(self) -> Budget:
        """Puts the budget in force. Raises ValueError if another is, BudgetError if what cannot leave exceeds it."""
        if self._budget is not None:
            raise ValueError("this budget is in force already")
        named = _named(self._alive())
        self._budget = torch.classes.reef.Budget(
            self._size,
            [tensor for _, tensor in named],
            [name for name, _ in named],
            self._device,
            [tier._tier for tier in self._tiers],
            self._prefetch,
            self._restore,
            self._addresses,
            self._strict,
            self._wait_while_full,
        )
        _in_force.add(self)
        return self

    def _alive(self) -> list[Target]:
        return [target for target in (known() for known in self._targets) if target is not None]

    @contextlib.contextmanager
    def whole(self, *targets: Target) -> Iterator[int]:
        """Inside ``with budget.whole(model, optimizer):`` their tensors are in memory, for code that reads without
        operators: ``torch.save``, ``copy.deepcopy``, pickle, numpy, a trainer's checkpoint. They come in one after
        another; until the end the budget is larger by their bytes, which ``with ... as size`` gives. Without targets:
        the budget's own. Also where no budget is in force, without effect."""
        if self._budget is None:
            yield 0
            return
        whole = self._budget.whole([tensor for _, tensor in _named(targets or self._alive())])
        try:
            yield whole.bytes()
        finally:
            whole.end()

    @property
    def ledger(self) -> Ledger:
        """Made when first asked for, and counting from then on: what is alive, as what, and when."""
        if self._ledger is None:
            self._ledger = Ledger()
            for target in self._alive():
                if isinstance(target, torch.optim.Optimizer):
                    self._ledger.watch(target)
        return self._ledger

    def stop(self) -> None:
        """Ends it: every page comes back. Raises what a tier raised; pages that could not be read then raise when
        accessed. Without effect if not in force."""
        if self._budget is None:
            return
        self._ended = (self.use(), self._budget.report(False))
        budget, self._budget = self._budget, None
        self._ledger = None
        _in_force.discard(self)
        budget.end()

    def __enter__(self) -> Budget:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def set_bytes(self, size: str | int) -> None:
        """Raises BudgetError, and keeps the old one, if what cannot leave exceeds it. With more bytes than before, pages
        come back as far as they fit, the last used first. Raises ValueError in a forked child."""
        self._in_force().set_bytes(_bytes(size))
        self._size = _bytes(size)

    def use(self) -> BudgetUse:
        """What it has done; after its end, what it had."""
        if self._budget is None and self._ended is not None:
            return self._ended[0]
        counts, *seconds = self._in_force().use()
        return BudgetUse(*counts, *seconds)

    @property
    def addresses(self) -> str:
        """Whether a tensor that is away keeps its address, and if not, or not for system calls, why."""
        return self._in_force().addresses()

    def outlook(self) -> list[BudgetOutlook]:
        """Now, with a quarter more, with half as much again, and so on up to the step's natural peak. Empty until a step
        has repeated."""
        return [BudgetOutlook(*step) for step in self._in_force().outlook()]

    def trace(self) -> Trace:
        """What the step that repeats does with its pages, for ``plan_swaps`` and ``simulate``. Empty until a step has been
        learnt. What is alive beside pages is not in it."""
        return _trace(self._in_force().trace())

    def report(self) -> str:
        """A text table of ``use()``, of the tiers, and, while it is in force, of the outlook."""
        if self._budget is None and self._ended is not None:
            return self._ended[1]
        return self._in_force().report(True)

    def reset_use(self) -> None:
        """Peaks, counts and the minimum begin anew."""
        self._in_force().reset_use()

    @property
    def peak_bytes(self) -> int:
        return self.use().peak_bytes

    @property
    def minimum_bytes(self) -> int:
        return self.use().minimum_bytes

    def _in_force(self) -> torch.ScriptObject:
        if self._budget is None:
            raise ValueError("this budget is not in force; start it by 'with' or start()")
        return self._budget


def _owners(target: object) -> list[object]:
    if isinstance(target, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return [target]
    return list(target)  # type: ignore[call-overload]


def _named(targets: Iterable[object]) -> list[tuple[str, torch.Tensor]]:
    """Their tensors, and what the program calls them; "" where it has no name."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    targets = [owner for target in targets for owner in _owners(target)]
    for target in targets:
        if isinstance(target, torch.nn.Module):
            for name, tensor in (*target.named_parameters(), *target.named_buffers()):
                named[id(tensor)] = (name, tensor)
    for target in targets:
        if isinstance(target, torch.optim.Optimizer):
            for parameter, state in target.state.items():
                of = named[id(parameter)][0] if id(parameter) in named else ""
                for key, value in state.items() if isinstance(state, dict) else ():
                    for tensor in _tensors([value]):
                        named.setdefault(id(tensor), (f"{key} of {of}" if of else str(key), tensor))
        elif isinstance(target, torch.Tensor):
            named.setdefault(id(target), ("", target))
    return list(named.values())


def budget(
    size: str | int,
    *targets: Target,
    spill: str | Path | None = None,
    tiers: Iterable[Tier] | None = None,
    device: str | torch.device = "cpu",
    prefetch: bool = True,
    restore: bool = True,
    addresses: str = "automatic",
    strict: bool = False,
    wait_while_full: bool = False,
) -> Budget:
    """While in force, the bytes that LibTorch's allocator has handed out on ``device`` stay within ``size`` (``"2GiB"``),
    at every allocation, and the program computes what it would have computed, bit for bit.

    ``targets`` (modules, optimizers, tensors) are known from the start; others become known when an operator meets them.
    Pages leave for ``tiers``, the first with room; by default host memory (for a CUDA device page-locked memory first, up to
    half of what the host has available), or with ``spill`` a file in that directory. ``"cuda"`` is the current device.
    Once a training step is known, pages move beside the operators, unless ``prefetch`` is false. When it ends every page
    comes back, unless ``restore`` is false: for models that memory could not hold.

    ``addresses="stay"`` where the kernel and the process's rights allow it: a tensor that is away keeps its address, and
    whoever reads or writes it through a pointer (numpy, a file being written, a compiled kernel) waits until it is back.
    An operator whose working set exceeds the budget becomes slow, or, with ``strict``, raises BudgetError and changes
    nothing; training may go on after ``set_bytes``. What is touched without an operator and cannot be read ends the
    process; if only no tier has room for what must leave (a full disk), ``wait_while_full`` lets it wait. ``"go"``: a tensor
    that is away has no address, and an access to it raises; such an operator always raises, code that keeps raw pointers over
    other operators must ``pin`` the tensor, and arrays made by ``numpy()`` stay in memory. ``"automatic"``: as far as the
    process may; ``Budget.addresses`` says.
    """
    if tiers is None:
        tiers = [disk_tier(spill)] if spill is not None else []
    elif spill is not None:
        raise ValueError("give spill or tiers, not both; spill is short for tiers=[reef.disk_tier(directory)]")
    device = str(torch.device(device))
    return Budget(_bytes(size), targets, device, list(tiers), prefetch, restore, addresses, strict, wait_while_full)


def addresses_here() -> str:
    """What ``addresses="automatic"`` comes to in this process: ``"stay"``, or that addresses go, or that they do not stay
    for system calls, and why."""
    return torch.ops.reef.addresses_here()


def pin(tensor: torch.Tensor) -> None:
    """Keeps ``tensor``'s page in memory until as many calls of ``unpin``."""
    torch.ops.reef.pin(tensor)


def unpin(tensor: torch.Tensor) -> None:
    """Undoes one ``pin``."""
    torch.ops.reef.unpin(tensor)
