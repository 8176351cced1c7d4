"""Checkpoints into states: taken whole, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from reef.ledger import category_scope

from .check import format_for
from .options import check_names, check_options, check_same_rule, name_of

if TYPE_CHECKING:
    from .optimizer import Optimizer

# How torch runs a step, not what it computes.
_HOW_TO_RUN = ("capturable", "differentiable")


def check_is_state_dict(where: str, given: Any) -> None:
    if not isinstance(given, Mapping) or "state" not in given or "param_groups" not in given:
        keys = ", ".join(map(str, list(given)[:3])) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"{where}: this is no optimizer's state_dict, it has {keys or 'nothing'}; give optimizer.state_dict()")
    groups, states = given["param_groups"], given["state"]
    sound = isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) and "params" in group for group in groups)
    if not sound or not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise ValueError(
            f"{where}: this is no optimizer's state_dict: param_groups are a list of dictionaries with params, and state is a "
            "dictionary of dictionaries; give optimizer.state_dict()"
        )


def check_order(where: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """States are taken by place, as torch takes them; where names show that places were changed, they are refused."""
    names, others = own.get("param_names"), saved.get("param_names")
    if names and others and names != others and sorted(names) == sorted(others):
        first = next(i for i, (name, other) in enumerate(zip(names, others, strict=True)) if name != other)
        raise ValueError(
            f"{where}: the loaded state dict has {others[first]} where the optimizer has {names[first]}, and the other in "
            "another place; give parameters in the order in which they were saved"
        )


def restored(
    optimizer: Optimizer, given: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[torch.Tensor, dict[str, torch.Tensor]]]:
    """Groups and states of a state_dict for this optimizer, made before anything of it is changed."""
    where = type(optimizer).__name__
    check_is_state_dict(where, given)
    own_groups, groups = optimizer.param_groups, given["param_groups"]
    if len(own_groups) != len(groups):
        raise ValueError(
            f"{where}: the loaded state dict has a different number of parameter groups, {len(groups)} for "
            f"{len(own_groups)}; build the optimizer as it was"
        )
    merged, states = [], {}
    left = dict(given["state"])
    for number, (own, saved) in enumerate(zip(own_groups, groups, strict=True)):
        here = where if len(groups) == 1 else f"{where}, group {number}"
        if len(own["params"]) != len(saved["params"]):
            raise ValueError(
                f"{here}: the loaded state dict has a group of {len(saved['params'])} parameters for one of "
                f"{len(own['params'])}; build the optimizer as it was"
            )
        check_order(here, own, saved)
        merged.append(_merged(optimizer, own, saved))
        check_options(here, merged[-1], optimizer.defaults)
        for index, (identity, p) in enumerate(zip(saved["params"], own["params"], strict=True)):
            state = left.pop(identity, None)
            if state:
                who = f"{here}: {name_of(own, index)}"
                states[p] = _restored(optimizer, merged[-1], "master" in saved, p, who, state)
        check_same_rule(here, own, saved)  # after states, by which more can be said
        check_names(here, saved, optimizer.defaults)
    if left:
        some = ", ".join(map(repr, list(left)[:3]))
        raise ValueError(
            f"{where}: the loaded state dict has states of parameters that are in none of its groups ({some}); save it again"
        )
    return merged, states


def _merged(optimizer: Optimizer, own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint says, and what it does not say as it is."""
    kept = {key: value for key, value in own.items() if key not in ("params", "param_names")}
    merged = {**kept, **saved, **{key: own[key] for key in _HOW_TO_RUN if key in own}}
    if optimizer._decoupled and "decoupled_weight_decay" in merged:
        merged["decoupled_weight_decay"] = True  # AdamW is AdamW, whatever it loads; as in torch
    return merged


def _restored(
    optimizer: Optimizer, group: dict[str, Any], says_master: bool, p: torch.Tensor, who: str, saved: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    names, values = [], []
    for name, value in saved.items():
        if value is None:
            continue  # torch's SGD, before a step with a momentum
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = torch.tensor(value, dtype=torch.float64)  # a step of other versions of torch
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{who}: {name} is no tensor but a {type(value).__name__} in the state that is loaded; it is of another "
                "optimizer: load it into the class that saved it"
            )
        if is_traceable_wrapper_subclass(value):
            raise ValueError(
                f"{who}: {name} is a {type(value).__name__} in the state that is loaded, of which only plain tensors are read; "
                "convert it in the program that saved it (full_tensor(), dequantize())"
            )
        names.append(name)
        values.append(value.detach())
    with category_scope("optimizer state"):
        made = torch.ops.reef.optim_restored(
            who, optimizer._rule, optimizer._numbers(group), format_for(group, p), group["master"], says_master,
            p.detach(), names, values,
        )  # fmt: skip
    return dict(zip(*made, strict=True))
