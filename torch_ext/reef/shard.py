"""Data parallel, with more or less of it divided among the ranks, bit for bit alike."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed

from ._function import number_of
from .compression import Compression
from .nonfinite_gradients import NonFiniteElements, _elements_of, _refuse_step
from .optimizer_states import OptimizerStates
from .part import part_of, whole_shape_of
from .price_exchange import ExchangePrices, _prices
from .shard_module import Look
from .shard_options import MixedPrecision, shard_options
from .shard_state import is_extra, tensors_of
from .stepped import Stepped


class _Native:
    """What is shared by the objects that stand for one module's shard; None once it has ended."""

    def __init__(self, shard: torch.ScriptObject, look: Look) -> None:
        self.shard: torch.ScriptObject | None = shard
        self._compresses = shard.compression() != "none"  # and so may find a pass void
        this = weakref.ref(self)
        self._stepped = Stepped(lambda optimizer: (native := this()) and native.before_step(optimizer))
        self.take_up(look)

    def take_up(self, look: Look) -> None:
        """What the shard has now is what ``look`` has seen."""
        assert self.shard is not None
        self.look = look
        self._stepped.take_up(self.shard.parameters())

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clears what the module's zero_grad() has cleared, and refuses a step of gradients that are void."""
        if self.shard is None:
            return
        self.shard.clear_gradients()
        self.look.check()  # all of its parameters may be others, which no pass has reduced
        if self._compresses:
            _refuse_step(optimizer, _elements_of(self.shard.nonfinite_gradients()))

    def end(self) -> None:
        self.shard = None
        self._stepped.end()


class Shard(OptimizerStates):
    """What the ranks of a group keep of one module; made by ``shard``. The module keeps it until ``end``, whether or not the
    program keeps this object."""

    def __init__(self, native: _Native, module: torch.nn.Module) -> None:
        self._native = native
        self._module = module

    @property
    def _shard(self) -> torch.ScriptObject:
        if self._native.shard is None:
            raise ValueError("this Shard has ended; call reef.shard once more")
        return self._native.shard

    def parameters(self) -> list[torch.Tensor]:
        """What this rank's optimizer steps. At stage ``"replicate"`` the module's own parameters that require a
        gradient, or, with ``mixed_precision`` or ``offload``, masters of them; else this rank's part of each of them (see
        ``part_of``), in memory of its own: as many, and in as many dimensions, on every rank, all dimensions but the last
        being 1, and without elements where other ranks keep all of it. ``whole_shape_of`` says the parameter's shape.
        Gradients appear here when backward is over; the module's own parameters have stand-ins for them, which nobody can
        read, and clearing one clears the gradients of its parts."""
        return self._shard.parameters()

    def names(self) -> list[str]:
        """Of each of these, the module's name for it; of a part ``name[first:last]``."""
        return self._shard.names()

    def param_groups(self, rule: Callable[[str, torch.Size], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``parameters()`` in groups for an optimizer. ``rule`` is called with each parameter's name in the module and its
        whole shape, and gives the options of its group. Parameters with equal options are one group, in the order in which
        these first come: the same groups on every rank, and those of one process. All ranks call this alike. ::

            groups = sharded.param_groups(lambda name, shape: {"weight_decay": 0.1 if len(shape) > 1 else 0.0})
            optimizer = torch.optim.AdamW(groups, lr=1e-3)

        Raises ValueError on all ranks if the rule gives anything but options, raises on one rank, or gives other options
        on another."""
        found: list[dict[str, Any]] = []
        keys: list[str] = []
        with self._on_all():
            for part, name in zip(self.parameters(), self.names(), strict=True):
                whole = _whole_name(part, name)
                options = rule(whole, whole_shape_of(part))
                if not isinstance(options, Mapping) or "params" in options:
                    raise ValueError(f"param_groups: the rule gives {options!r} for {whole}; give a dict of options")
                if options not in found:
                    found.append(dict(options))
                number = found.index(dict(options))
                keys.append(f"{found[number]} (group {number})")
        groups = self._shard.param_groups(keys)
        return [{"params": params, **options} for params, options in zip(groups, found, strict=True)]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward adds gradients up on this rank and sends nothing. All ranks do so alike."""
        self._shard.begin_no_sync()
        try:
            yield
        finally:
            self._shard.end_no_sync()

    @contextlib.contextmanager
    def local_sums(self) -> Iterator[None]:
        """Backward gives ``parameters()`` this rank's own sums, which a step uses, and sends nothing, not a byte: parameters
        are each rank's own from then on (local SGD), until ``average_parameters``. A rank may take other steps than others.
        Buffers stay each rank's, too. All ranks begin and end it alike. ::

            with sharded.local_sums():
                for batch in batches:
                    optimizer.zero_grad()
                    loss(model(batch)).backward()
                    optimizer.step()
            sharded.average_parameters()

        Raises ValueError above stage ``"replicate"``."""
        self._shard.begin_local_sums()
        try:
            yield
        finally:
            self._shard.end_local_sums()

    def join(self, step: Callable[[], object]) -> None:
        """For ranks that have different numbers of batches: each calls it when it has no more. Until none has any, it takes
        part in the passes of the others, as if with a batch whose gradients are zero, and calls ``step`` after each, which
        does what the others do after theirs: steps the optimizer, clips by the norm of the group, changes the learning rate.
        So a step is, bit for bit, that of one process that accumulates over the batches that there are and divides, for
        ``reduction="mean"``, by the number of ranks. ::

            for batch in batches:
                optimizer.zero_grad()
                loss(model(batch)).backward()
                optimizer.step()
            sharded.join(optimizer.step)

        The others take one step after each pass. Gradients are cleared before each. A pass that is abandoned is passed over.
        Raises ValueError in ``no_sync``, in ``local_sums`` and beside a DelayedUpdate, and what ``step`` raises."""

        def call() -> list[torch.Tensor]:
            step()
            return []

        self._shard.join(number_of(call))

    def average_parameters(self) -> None:
        """Makes each of ``parameters()`` its mean over the ranks: added up in the order of ranks and in its dtype, then divided;
        and buffers become what ``buffers`` says. Gradients and states of the optimizer stay each rank's. All ranks call
        this alike. Raises ValueError above stage ``"replicate"``, and torch.distributed.DistError if a rank is gone."""
        self._shard.average_parameters()

    def end(self) -> None:
        """Leaves the module to this rank alone, with whole parameters as they are now. All ranks call this alike."""
        self._shard.gather()
        self._native.end()
        del _of_module[self._module]

    def refresh(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Takes up what has become of the module since: parameters that are new, gone, frozen or not, in other memory or of
        another dtype, other buffers. As if the module were sharded anew, but masters keep their bits, and gradients that are
        held back (``compression``) stay so. ``parameters()`` are new tensors then: make the optimizer anew, or give it here. It
        then has the new parts of what it had, with their states, and not of what is gone; what is new (a layer in another's
        place, too) goes into a group by ``add_param_group``, as ever.
        All ranks call this alike.

        Raises ValueError on all ranks as ``shard`` does, and then the module is whole and no longer sharded."""
        states = None if optimizer is None else self.full_optimizer_state_dict(optimizer)
        before, look = self._native.look.parameters, Look(self._module)
        try:
            self._shard.refresh(*look.lists(), *look.numbers())
        except BaseException:
            if self._shard.has_ended():
                self._native.end()
            raise
        self._native.take_up(look)
        if optimizer is None or states is None:
            return
        parts = {_whole_name(part, name): part for part, name in zip(self.parameters(), self.names(), strict=True)}
        names_now = {id(p): name for name, p in reversed(look.parameters.items())}
        for own, saved in zip(optimizer.param_groups, states["param_groups"], strict=True):
            named = zip(saved["param_names"], saved["params"], strict=True)
            kept = {names_now[id(before[name])]: n for name, n in named if id(before[name]) in names_now}
            kept = {name: n for name, n in kept.items() if name in parts}
            own["params"] = [parts[name] for name in kept]
            saved["param_names"], saved["params"] = list(kept), list(kept.values())
        present = {number for saved in states["param_groups"] for number in saved["params"]}
        states["state"] = {number: values for number, values in states["state"].items() if number in present}
        optimizer.state.clear()
        states.pop("communication", None)  # the shard has kept it
        self._load_optimizer_state_dicts(optimizer, [states], communication=False)

    def gather(self) -> None:
        """Makes the module's parameters what the ranks' optimizers have made of their parts. Happens by itself when an
        operator first reads a parameter after a step, so all ranks must do that or this alike. At stage ``"parameters"``
        all of them are in memory then, until operators need others."""
        self._shard.gather()

    # ---- states: either kind is loaded at any stage, by any number of ranks, bit for bit

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """What ``module.state_dict()`` would be in one process, as copies on the CPU. All ranks call this; ``rank0_only``:
        an empty one on the others. A rank sends what it keeps to each other rank."""
        whole = self._shard.full_state_dict(rank0_only)
        with self._on_all():
            return {key: whole.get(key, value) for key, value in self._module.state_dict().items()} if whole else {}

    def sharded_state_dict(self) -> dict[str, Any]:
        """What this rank keeps: ``parameters()`` by ``names()``, and what all ranks have. Shares their memory."""
        kept, module = self._shard.sharded_state_dict(), self._module.state_dict()
        hidden = {name for name, _ in self._module.named_buffers(remove_duplicate=False)} - module.keys()
        other = {key: value for key, value in module.items() if is_extra(key)}
        return {**{key: value for key, value in kept.items() if key not in hidden}, **other}

    def load_state_dict(self, *state_dicts: Mapping[str, Any]) -> None:
        """Of one full state dict, or of the sharded ones of all ranks of the run that saved them (``torch.load`` them with
        ``mmap=True``: a rank reads what it keeps). All ranks call this; if any gives nothing, all are given what rank 0 has.
        Raises ValueError on all ranks, before anything has changed, if something is missing, unknown or of another shape on
        one of them."""
        with self._on_all():
            persistent = self._module.state_dict().keys()
            hidden = {n: b for n, b in self._module.named_buffers(remove_duplicate=False) if n not in persistent}
            given = [{**hidden, **tensors_of(each)} for each in state_dicts if each]
        self._shard.load_state_dict(given)
        with self._on_all():
            if extra := {k: v for each in state_dicts for k, v in each.items() if is_extra(k)}:
                self._module.load_state_dict(extra, strict=False)

    def _states(self) -> torch.ScriptObject:
        return self._shard

    def _wait_for_states(self) -> None:
        self._shard.wait_for_update()

    def _communication(self) -> Any:
        return self._shard.communication()

    def _load_communication(self, data: Any) -> None:
        self._shard.load_communication(data)

    def nonfinite_gradients(self) -> list[NonFiniteElements]:
        """Whose gradients were not finite in the last pass that was reduced, by parameter, in the module's order and that of
        ranks; the same on all ranks, and empty if all were finite. Such a pass is void: all its gradients are NaN, on all
        ranks, and what is held back (``compression``) is, bit for bit, what it was before. ``optimizer.step()`` then raises
        ``reef.optim.NonFiniteGradient`` on all ranks, and has changed nothing; a ``GradScaler`` leaves the step out.
        Clear the gradients, and go on with the next batch. Raises ValueError without a compression, where gradients arrive as
        they are."""
        return _elements_of(self._shard.nonfinite_gradients())

    @property
    def resident_bytes(self) -> int:
        """How many bytes of gathered parameters may stay now (stage ``"parameters"``); the same on all ranks."""
        return self._shard.resident_bytes()

    @property
    def compression(self) -> str:
        """How gradients travel: what was given, or what ``"auto"`` has chosen."""
        return self._shard.compression()

    @property
    def compression_prices(self) -> ExchangePrices | None:
        """By which prices ``"auto"`` has chosen; None, if a method was given, or there is one rank."""
        prices = self._shard.compression_prices()
        return _prices(*prices) if prices else None

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent for gradients and parameters."""
        return self._shard.sent_bytes()


# What modules keep: they need not be told to keep what shard() returns.
_of_module: weakref.WeakKeyDictionary[torch.nn.Module, _Native] = weakref.WeakKeyDictionary()


def _whole_name(part: torch.Tensor, name: str) -> str:
    return name if part_of(part) is None else name.rpartition("[")[0]


def shard(
    module: torch.nn.Module,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    stage: str | int = "replicate",
    bucket_bytes: str | int = "25MiB",
    reduction: str = "mean",
    sum_order: str = "ranks",
    compression: Compression | str = "none",
    allow: Iterable[str] = (),
    resident_bytes: str | int | None = None,
    shard_degree: int = 0,
    buffers: str = "local",
    ignored: Iterable[torch.Tensor] = (),
    mixed_precision: MixedPrecision | torch.dtype | None = None,
    offload: bool = False,
) -> Shard:
    """Trains an unmodified module on all ranks of ``group`` (by default torch.distributed's own): makes it what it is on
    rank 0, and from now on reduces its gradients during backward. ``stage`` says what is divided among the ranks: nothing
    (``"replicate"``, DDP), the optimizer's states (``"optimizer"``, ZeRO-1), and the gradients (``"gradients"``, ZeRO-2),
    and the parameters (``"parameters"``, ZeRO-3), or 0 to 3. Of the last, so many ``resident_bytes`` may stay gathered; if
    they are not given, what a ``Budget`` leaves free on every rank, and none without one.
    Gradients are added up in the order of ranks, so a step is bit for bit that of one process that accumulates over the same
    micro-batches, and divides by the number of ranks for ``reduction="mean"``. With ``sum_order="native"`` they are added
    up as the backend's own reduce-scatter or all-reduce does: then that holds within rounding only. It is for devices; over
    gloo it sends gradients twice above ``"replicate"``.

    With a ``compression`` gradients travel in fewer bytes (docs/compress.md), and what a rank does not send is held back
    there and added to the next gradient, so that nothing is lost. It gives up the bits of one process; ranks are alike. What is
    held back is in the optimizer's state dicts, and takes the bytes of the gradients. A name stands for ``Compression(name)``.
    ``"auto"`` measures the link and the work, prices an exchange of these parameters by each method (``price_exchange``), and
    takes the fastest, the same on all ranks: ``Shard.compression``. It may be of the classes that ``allow`` names
    (``"exact"``, ``"unbiased"``, ``"error_feedback"``, ``"lossy"``); if it names none, of all but ``"lossy"``.

    With a ``shard_degree`` other than 0 what is divided is divided among so many ranks, which follow each other, and each
    such set has a copy of all of it (hybrid sharding, HSDP): parameters are gathered within it, and of gradients only what
    has been added up leaves it. It divides the number of ranks.

    ``buffers`` (running statistics) stay ``"local"``, or become rank 0's (``"broadcast"``) or the ``"mean"`` over the ranks
    when gradients have been reduced. Parameters that are ``ignored`` are each rank's own business, and none of
    ``parameters()``.

    With ``mixed_precision`` parameters of 16 bits, those that were so before and those that become so, have float32
    masters: what ``parameters()`` gives at every stage, with the values from before. The module's parameters are the masters
    rounded. A dtype stands for ``MixedPrecision(dtype)``. With ``offload``, ``parameters()`` are copies in host memory, and so
    the optimizer's states and step: gradients go there as they are reduced, and the parameters come back after the step.

        group = reef.init_process_group()
        sharded = reef.shard(model, group, stage="optimizer")
        optimizer = torch.optim.AdamW(sharded.parameters())

    Raises ValueError on every rank if the ranks' modules differ (with the first difference), and
    torch.distributed.DistError if a rank is gone, or makes other calls than the ranks that wait for it."""
    if group is None:
        group = torch.distributed.group.WORLD
        if group is None:
            raise ValueError("reef.shard: there is no process group; make one with reef.init_process_group")
    options = shard_options(
        stage=stage, bucket_bytes=bucket_bytes, reduction=reduction, sum_order=sum_order, compression=compression, allow=allow,
        resident_bytes=resident_bytes, shard_degree=shard_degree, buffers=buffers, ignored=ignored, mixed_precision=mixed_precision,
        offload=offload,
    )  # fmt: skip
    look = Look(module)
    made = torch.ops.reef.shard(*look.lists(), group.boxed(), options, *look.numbers())
    _of_module[module] = _Native(made, look)
    return Shard(_of_module[module], module)


def shard_of(module: torch.nn.Module) -> Shard | None:
    """Returns what ``shard(module)`` has returned, or None if it was not called or has been ended."""
    native = _of_module.get(module)
    return native and Shard(native, module)
