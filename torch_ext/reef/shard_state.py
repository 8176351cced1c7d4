"""State dicts of optimizers as data that reef::Shard divides and puts together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .part import part_of

Data = tuple[tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, Any], ...]], ...], tuple[Any, ...], tuple[Any, ...]]
"""Groups: ids, names, options. What each id has, by key. And what is held back of gradients."""


def held(state_dict: dict[str, Any]) -> torch.ScriptObject:
    """Raises ValueError for what is not an optimizer's state dict, or cannot be sent to other ranks."""
    try:
        return torch.classes.reef.OptimizerState(data_of(state_dict))
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"an optimizer's state has something that cannot be sent to other ranks: {error}") from error


def data_of(state_dict: dict[str, Any]) -> Data:
    groups = tuple(
        (
            tuple(map(str, group["params"])),
            tuple(group.get("param_names", ())),
            tuple((key, value) for key, value in group.items() if key not in ("params", "param_names")),
        )
        for group in state_dict.get("param_groups", ())
    )
    states = tuple((str(number), tuple(values.items())) for number, values in state_dict.get("state", {}).items())
    return groups, states, _communication_data(state_dict.get("communication") or {})


def _communication_data(held_back: Mapping[str, Any]) -> tuple[Any, ...]:
    of_ranks = tuple(
        (int(rank), tuple((name, tuple(values.items())) for name, values in of_rank.items()))
        for rank, of_rank in held_back.get("of_ranks", {}).items()
    )
    return held_back.get("method", ""), held_back.get("ranks", 0), tuple(held_back.get("numbers", {}).items()), of_ranks


def communication_of(data: tuple[Any, ...]) -> dict[str, Any]:
    """The entry of an optimizer's state dict; none, where nothing is remembered."""
    method, ranks, numbers, of_ranks = data
    if not method:
        return {}
    held_back = {rank: {name: dict(values) for name, values in of_rank} for rank, of_rank in of_ranks}
    return {"communication": {"method": method, "ranks": ranks, "numbers": dict(numbers), "of_ranks": held_back}}


def dict_of(data: Data, *, named: bool) -> dict[str, Any]:
    groups, states, communication = data
    return {
        **communication_of(communication),
        "state": {int(number): dict(values) for number, values in states},
        "param_groups": [
            {**dict(options), "params": [int(number) for number in numbers], **({"param_names": list(names)} if named else {})}
            for numbers, names, options in groups
        ],
    }


def tensors_of(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Raises ValueError for what is no tensor, and nothing that modules save besides."""
    for key, value in state_dict.items():
        if not isinstance(key, str) or not (isinstance(value, torch.Tensor) or is_extra(key)):
            raise ValueError(f"the state that is loaded has {key!r} of {type(value).__name__}; give a module's state dict")
    return {key: value for key, value in state_dict.items() if not is_extra(key)}


def is_extra(key: str) -> bool:
    """What a module gives besides tensors: torch's get_extra_state()."""
    return key.endswith("_extra_state")


def with_names(optimizer: torch.optim.Optimizer, names: dict[int, str], *, states: bool) -> dict[str, Any]:
    """The optimizer's state dict, in which groups say whose states they are; or without ``states``, the keys of their options
    alone. ``names`` by the tensors' id()."""
    found = optimizer.state_dict() if states else {"state": {}, "param_groups": _numbered(optimizer)}
    for group, own in zip(found["param_groups"], optimizer.param_groups, strict=True):
        unknown = [i for i, p in enumerate(own["params"]) if id(p) not in names]
        if unknown:
            raise ValueError(
                f"the optimizer has tensors (the first is parameter {unknown[0]} of a group) that are none of the shard's "
                "parameters(): give it those, and others an optimizer of their own"
            )
        group["param_names"] = [names[id(p)] for p in own["params"]]
        for number, p in zip(group["params"], own["params"], strict=True):
            if p.numel() == 0 and (part := part_of(p)) is not None and part.whole_elements > 0:
                found["state"].pop(number, None)  # others keep it
    return found


def _numbered(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    numbers = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
    return [
        {**dict.fromkeys(group), "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups
    ]
