"""Callables that the library calls: it knows them by number, through two operators whose kernels are here."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable

import torch

from . import _library  # noqa: F401  (the operators)

Function = Callable[..., list[torch.Tensor]]

_functions: dict[int, Function] = {}
_numbers = itertools.count()


def number_of(function: Function) -> int:
    """A number for the library, which forgets it when it no longer needs the function."""
    number = next(_numbers)
    _functions[number] = function
    return number


def _call(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return _functions[number](*tensors)


def _forget(number: int) -> None:
    _functions.pop(number, None)


_kernels = torch.library.Library("reef", "IMPL")
_kernels.impl("call_function", _call, "CompositeImplicitAutograd")
_kernels.impl("forget_function", _forget, "CompositeImplicitAutograd")
atexit.register(torch.ops.reef.python_ends)
