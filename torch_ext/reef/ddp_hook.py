"""Reef's compressions for torch's DistributedDataParallel: communication hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .bytes import parse_bytes
from .compression import Compression, as_compression
from .nonfinite_gradients import NonFiniteElements, _elements_of, _refuse_step
from .price_exchange import ExchangePrices, _prices
from .process_group import _boxed
from .shard_state import communication_of, held


class DdpHook:
    """What exchanges the gradients of one DistributedDataParallel; made by ``ddp_hook``. The model keeps it."""

    def __init__(self, native: torch.ScriptObject, model: DistributedDataParallel) -> None:
        self._native = native
        self._model = weakref.ref(model)
        self._refuses_steps = native.compression() != "none"
        _live.add(self)
        # Not as Python frees it: whoever waits for an exchange then would hold the lock that its end may need.
        self._end = weakref.finalize(self, native.close)

    def _exchange(self, _state, bucket):
        """The hook, once for each of torch's buckets. It has no annotations, which torch would compare with its own."""
        model = self._model()
        if model._join_config.enable:
            raise ValueError(
                "reef.ddp_hook: DistributedDataParallel.join() is not for gradients that are held back: give each rank as many "
                "batches, or take reef.shard, whose join() is"
            )
        buffer = bucket.buffer()
        self._native.exchange(buffer, bucket.parameters(), bucket.is_last())
        # Torch looks at none before it has called this for all buckets; the last call returns when all are the mean, since
        # from then on backward has nothing to compute beside it, and errors of a future lose their class.
        done = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _end_pass(self, *_: object) -> None:
        """Of the pass before, when the next forward pass begins: only once backward is over does torch know which parameters
        no rank has used, and tell it."""
        model = self._model()
        finds_unused = model is not None and (model.find_unused_parameters or model.static_graph)
        self._native.end_pass(model.reducer._get_local_used_map() if finds_unused else None)

    def nonfinite_gradients(self) -> list[NonFiniteElements]:
        """Whose gradients were not finite in the last pass, by parameter, in the module's order and that of ranks; the same on
        all ranks, and empty if all were finite. Such a pass is void: all its gradients are NaN, on all ranks, and what is
        held back is, bit for bit, what it was before. ``optimizer.step()`` then raises ``reef.optim.NonFiniteGradient`` on all
        ranks, and has changed nothing; a ``GradScaler`` leaves the step out. Go on with the next batch. Raises ValueError
        without a compression, where gradients arrive as they are."""
        return _elements_of(self._native.nonfinite_gradients())

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """What all ranks hold back, after backward: save it beside the states of the module and the optimizer. On ranks other
        than 0 empty, if ``rank0_only``. All ranks call it alike. As many times the gradients' bytes as there are ranks: of a
        large model save the ``sharded_state_dict`` of each rank."""
        self._end_pass()
        return _dict_of(self._native.full_state(rank0_only))

    def sharded_state_dict(self) -> dict[str, Any]:
        """What this rank holds back. It shares that memory, and sends nothing."""
        self._end_pass()
        return _dict_of(self._native.state())

    def load_state_dict(self, *state_dicts: Mapping[str, Any]) -> None:
        """Goes on from one ``state_dict``, or from the ``sharded_state_dict`` of all ranks of a run, however many these were,
        bit for bit if they are as many; or from the entry ``communication`` of what ``reef.Shard`` has saved of an optimizer.
        If a rank gives none, all are given what rank 0 has. All ranks call it alike. Raises ValueError on all ranks, and
        nothing has changed, for a state of another compression, of other parameters, or not of all ranks."""
        self._end_pass()
        wrong = None
        given: list[torch.ScriptObject] = []
        try:
            given = [held({"communication": dict(each)}) for each in state_dicts]
        except (ValueError, TypeError) as error:
            wrong = error
            given = [held({"communication": {"method": "unreadable"}})]  # which is refused on all ranks
        try:
            self._native.load_state(given)
        except ValueError as error:
            raise wrong or error from error

    def close(self) -> None:
        """Waits for an exchange that is running, and gives up what is held back. The model cannot run backward any more:
        wrap its module anew."""
        self._refuses_steps = False
        self._end()

    @property
    def compression(self) -> str:
        """How gradients travel: what was given, or what ``"auto"`` has chosen."""
        return self._native.compression()

    @property
    def compression_prices(self) -> ExchangePrices | None:
        """By which prices ``"auto"`` has chosen; None, if a method was given, or there is one rank."""
        prices = self._native.compression_prices()
        return _prices(*prices) if prices else None

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent for gradients."""
        return self._native.sent_bytes()


_live: weakref.WeakSet[DdpHook] = weakref.WeakSet()
_hooks: list[Any] = []  # of all optimizers, from the first of these on


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuses a step of gradients that are void."""
    for hook in list(_live):
        found = hook.nonfinite_gradients() if hook._refuses_steps else []
        model = hook._model()
        if not found or model is None:
            continue
        exchanged = {id(p) for p in model.module.parameters()}
        if any(id(p) in exchanged for group in optimizer.param_groups for p in group["params"]):
            _refuse_step(optimizer, found)


def _dict_of(data: tuple[Any, ...]) -> dict[str, Any]:
    return communication_of(data).get("communication", {})


def ddp_hook(
    model: DistributedDataParallel,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    compression: Compression | str = "none",
    bucket_bytes: str | int = "25MiB",
    allow: Iterable[str] = (),
) -> DdpHook:
    """Lets the gradients of ``model`` travel by a ``compression`` of Reef's (docs/compress.md), as a communication hook, which it
    registers. What a rank does not send is held back there and added to its next gradient. Gradients become the mean over the
    ranks, bit for bit what ``reef.shard(module, compression=compression, bucket_bytes=bucket_bytes)`` makes of them: they
    travel in buckets that are laid out once by parameters, whatever torch's own are or become. ::

        model = torch.nn.parallel.DistributedDataParallel(module)
        hook = reef.ddp_hook(model, compression=reef.Compression("gtopk", density=0.01))

    ``group``: of the model's ranks, by default the model's own. With one of ``reef.init_process_group`` a rank that is gone is
    named. ``allow``: of which classes ``"auto"`` may choose, as in ``reef.shard``. For modules on the CPU.

    All ranks call it alike. Raises ValueError if the ranks were given different options or parameters (with the first
    difference), and for a model whose gradients do not come as a hook needs them (mixed precision or buckets of torch's that
    are left out, sparse gradients, another hook); torch.distributed.DistError if a rank is gone."""
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"reef.ddp_hook was given a {type(model).__name__}: give it a torch.nn.parallel.DistributedDataParallel; for a module "
            "as it is there is reef.shard"
        )
    if reason := _not_for_a_hook(model):
        raise ValueError(f"reef.ddp_hook was given a DistributedDataParallel {reason}")
    group = model.process_group if group is None else group
    if (group.rank(), group.size()) != (model.process_group.rank(), model.process_group.size()):
        raise ValueError("reef.ddp_hook was given a group with other ranks than the model's: give one of the same")
    compression = as_compression(compression)
    ignored = model.parameters_to_ignore
    parameters = {n: p for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored}
    native = torch.ops.reef.ddp_hook(
        list(parameters.values()), list(parameters), _boxed(group), parse_bytes(bucket_bytes), compression.method,
        *compression._options(), list(allow),
    )  # fmt: skip
    hook = DdpHook(native, model)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    model.register_comm_hook(None, hook._exchange)
    model.register_forward_pre_hook(hook._end_pass)
    return hook


def _not_for_a_hook(model: DistributedDataParallel) -> str:
    """Why its gradients cannot be exchanged, or an empty text."""
    if model._comm_hooks:
        return "that has a communication hook: wrap the module anew"
    if model.mixed_precision is not None:
        return "with mixed_precision, whose buckets are not of the parameters' dtype: leave it out, or take reef.shard"
    if getattr(model, "_use_python_reducer", False):
        return "whose gradients torch.compile reduces (python_reducer): set torch._dynamo.config.optimize_ddp otherwise"
    if getattr(model, "skip_all_reduce_unused_params", False):
        return "with skip_all_reduce_unused_params, whose ranks leave out buckets: leave it out"
    if any(isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and m.sparse for m in model.module.modules()):
        return "with sparse gradients: make its embeddings with sparse=False"
    return ""
