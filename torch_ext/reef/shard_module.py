"""What a sharded module has now, which may be other than when it was sharded."""

from __future__ import annotations

import weakref

import torch
from torch.nn.modules import module as modules

from ._function import number_of

_registered = 0
"""How many parameters and modules have been given to modules, since the first look_at: where none has, none has changed."""
_hooks: list[object] = []


def _count(*_: object) -> None:
    global _registered
    _registered += 1


def look_at(module: torch.nn.Module, buffer_names: list[str]) -> tuple[int, int]:
    """Numbers of two functions (see ``_function``): one that raises ValueError if the module's parameters are not those that
    it has now, and one that gives its buffers of these names. Neither keeps the module."""
    if not _hooks:
        _hooks.append(modules.register_module_parameter_registration_hook(_count))
        _hooks.append(modules.register_module_module_registration_hook(_count))
    alive, known = weakref.ref(module), set(buffer_names)
    before = dict(module.named_parameters(remove_duplicate=False))
    seen = _registered

    def check() -> list[torch.Tensor]:
        nonlocal seen
        now = alive()
        if now is None or seen == _registered:
            return []
        refuse_other(before, dict(now.named_parameters(remove_duplicate=False)))
        seen = _registered
        return []

    def buffers() -> list[torch.Tensor]:
        now = alive()
        if now is None:
            return []
        found = dict(now.named_buffers(remove_duplicate=False))
        if found.keys() != known:
            other = min(found.keys() ^ known)
            raise ValueError(f"the module has or had a buffer {other}, and not when reef.shard was called: call refresh()")
        return [found[name] for name in buffer_names]

    return number_of(check), number_of(buffers)


def refuse_other(before: dict[str, torch.nn.Parameter], now: dict[str, torch.nn.Parameter]) -> None:
    for name, p in now.items():
        if before.get(name) is not p:
            raise ValueError(f"parameter {name} of the module is not one that it had when reef.shard was called: call the "
                             "shard's refresh(), and make the optimizer anew")  # fmt: skip
    if gone := before.keys() - now.keys():
        raise ValueError(f"parameter {min(gone)} is not the module's any more: call the shard's refresh(), and make the "
                         "optimizer anew")  # fmt: skip
