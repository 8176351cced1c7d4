"""What a sharded module has now, which may be other than when it was sharded."""

from __future__ import annotations

import weakref

import torch
from torch.nn.modules import module as modules

from ._function import number_of

_registered = 0
"""How many parameters and modules have been given to modules since the first look: where none has, none has changed."""
_hooks: list[object] = []


def _count(*_: object) -> None:
    global _registered
    _registered += 1


def _tensors_of(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Its parameters and its buffers, under every name."""
    return dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers(remove_duplicate=False))


class Look:
    """A look at a module, which it does not keep, from its sharding on."""

    def __init__(self, module: torch.nn.Module) -> None:
        if not _hooks:
            _hooks.append(modules.register_module_parameter_registration_hook(_count))
            _hooks.append(modules.register_module_module_registration_hook(_count))
        self._module = weakref.ref(module)
        self._seen = _registered
        self.parameters, buffers = _tensors_of(module)
        self._buffer_names = list(buffers)

    def lists(self) -> tuple[list[torch.Tensor], list[str], list[torch.Tensor], list[str]]:
        """Parameters, their names, buffers, their names, as the library takes them."""
        return list(self.parameters.values()), list(self.parameters), self.buffers(), self._buffer_names

    def may_have_changed(self) -> bool:
        return self._seen != _registered

    def check(self) -> list[torch.Tensor]:
        """Raises ValueError if the module's parameters are not those that it had."""
        module = self._module()
        if module is None or not self.may_have_changed():
            return []
        now, _ = _tensors_of(module)
        for name, p in now.items():
            if self.parameters.get(name) is not p:
                raise ValueError(f"parameter {name} of the module is not one that it had when reef.shard was called: call the "
                                 "shard's refresh(), and make the optimizer anew")  # fmt: skip
        if gone := self.parameters.keys() - now.keys():
            raise ValueError(f"parameter {min(gone)} is not the module's any more: call the shard's refresh(), and make the "
                             "optimizer anew")  # fmt: skip
        self._seen = _registered
        return []

    def buffers(self) -> list[torch.Tensor]:
        """The module's buffers as they are now, in the order that they had; none, if the module is gone. Raises ValueError if
        they have other names."""
        module = self._module()
        if module is None:
            return []
        _, now = _tensors_of(module)
        if other := now.keys() ^ set(self._buffer_names):
            raise ValueError(f"the module has or had a buffer {min(other)}, and not when reef.shard was called: call the "
                             "shard's refresh()")  # fmt: skip
        return [now[name] for name in self._buffer_names]

    def numbers(self) -> tuple[int, int]:
        """Of check and buffers, for the library."""
        return number_of(self.check), number_of(self.buffers)
