"""Callables that the library calls: it knows them by number, through two operators whose kernels are here."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import types
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


def modules_of(function: Callable) -> list[torch.nn.Module]:
    """The modules that can be found in a callable: itself, what it is a method of, what ``functools.partial`` has bound, and
    variables of an enclosing function or defaults, in lists, tuples and dicts of at most a thousand too."""
    found: list[torch.nn.Module] = []
    seen: set[int] = set()

    def visit(thing) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            found.append(thing)
        elif isinstance(thing, functools.partial):
            for each in (thing.func, *thing.args, *thing.keywords.values()):
                visit(each)
        elif isinstance(thing, types.MethodType):
            visit(thing.__self__)
        elif isinstance(thing, types.FunctionType):
            for cell in thing.__closure__ or ():
                with contextlib.suppress(ValueError):  # still empty
                    visit(cell.cell_contents)
            for each in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
                visit(each)
        elif isinstance(thing, (list, tuple, dict)) and len(thing) <= 1000:
            for each in thing.values() if isinstance(thing, dict) else thing:
                visit(each)

    visit(function)
    return found


def _call(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return _functions[number](*tensors)


def _forget(number: int) -> None:
    _functions.pop(number, None)


_kernels = torch.library.Library("reef", "IMPL")
_kernels.impl("call_function", _call, "CompositeImplicitAutograd")
_kernels.impl("forget_function", _forget, "CompositeImplicitAutograd")
atexit.register(torch.ops.reef.python_ends)
