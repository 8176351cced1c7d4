"""Tensors that modules carry from call to call as attributes, which a second run must find as the first did."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ._function import modules_of

_MISSING = object()


class Carried:
    """A callable as it is, except that where it is run again (or to be measured), the modules in it have those tensors as
    buffers and plain attributes which they had before it was run first, and afterwards those that they have now. A module that replaces a tensor of its own (``self.average = 0.9 * self.average + ...``) does so once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._modules = modules_of(function)
        self._found: list[tuple[dict, str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.ops.reef.is_run_again():
            before = self._attributes()
            self._put(self._found)
            try:
                return self._function(*args, **kwargs)
            finally:
                self._put(_replaced(before))
        before = self._attributes()
        try:
            return self._function(*args, **kwargs)
        finally:
            self._found = _replaced(before)

    def _attributes(self) -> list[tuple[dict, dict]]:
        all_of = [module for outer in self._modules for module in outer.modules()]
        return [(of, of.copy()) for module in all_of for of in (module._buffers, module.__dict__)]

    @staticmethod
    def _put(found: list[tuple[dict, str, Any]]) -> None:
        for of, name, value in found:
            if value is _MISSING:
                of.pop(name, None)
            else:
                of[name] = value


def _replaced(before: list[tuple[dict, dict]]) -> list[tuple[dict, str, Any]]:
    """Of what was there before and is another tensor now, or none, what it was."""
    found = []
    for of, then in before:
        if len(of) == len(then) and all(map(operator.is_, of.values(), then.values())):
            continue
        for name in of.keys() | then.keys():
            was, is_now = then.get(name, _MISSING), of.get(name, _MISSING)
            if was is not is_now and (isinstance(was, torch.Tensor) or isinstance(is_now, torch.Tensor)):
                found.append((of, name, was))
    return found
