"""Recomputes in backward what would else be kept for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from ._carried import Carried
from ._function import number_of

T = TypeVar("T")


def checkpoint(function: Callable[..., T], *args: Any, check_values: bool = False, **kwargs: Any) -> T:
    """``function(*args, **kwargs)``, whose intermediate tensors are not kept for backward but computed once more there:
    only the tensors among the arguments, however nested, are kept.

    The graph is the real one, so gradients are bit for bit those of the plain call, of captured tensors and parameters
    too, whether arguments require a gradient or not; ``torch.autograd.grad``, retained graphs, double backward, hooks and
    nested calls work. ``function`` must compute the same when it is called again: the default generators, autocast, and
    tensors that it both reads and writes (running averages) are as in the first run then, and what it writes is put back.
    So are tensors that modules found in it have as buffers or attributes and replace. What else it reads must not be
    modified until backward. The second run is ended by an exception from within an operator as soon as all that is needed is there.
    Numbers, shapes and dtypes of what autograd saves are compared, and with ``check_values`` a hash of the values;
    RuntimeError if they differ, if what is saved or read was modified in place since, or if ``function`` carries a tensor
    from run to run in a way that is not seen here."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, structure = _pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = [leaves[place] for place in places]
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    kept = _Kept.apply(torch.empty(0, requires_grad=True), *inputs)
    function = Carried(function)

    def again() -> list[torch.Tensor]:
        filled = list(others)
        for place, tensor in zip(places, kept.grad_fn.saved_tensors, strict=True):
            filled[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        again_args, again_kwargs = _pytree.tree_unflatten(filled, structure)
        function(*again_args, **again_kwargs)
        return []

    devices = sorted({str(tensor.device) for tensor in inputs if tensor.device.type != "cpu"})
    region = torch.classes.reef.CheckpointRegion(number_of(again), devices, check_values)
    try:
        return function(*args, **kwargs)
    finally:
        region.end()


def is_undone() -> bool:
    """Whether what this thread runs is run once more for backward, or measured by ``Chain.profile``: what it writes into
    tensors that were there is put back. For functions that do something else besides computing: count, log, draw."""
    return torch.ops.reef.is_undone()


class _Kept(torch.autograd.Function):
    """Keeps tensors as autograd does, through hooks that are in force: an outer region forgets them. The result is what
    keeps them; of its ``grad_fn`` alone they would be gone."""

    @staticmethod
    def forward(ctx: Any, nothing: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return nothing.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise RuntimeError("reef.checkpoint: nothing goes backward through what only keeps tensors")
