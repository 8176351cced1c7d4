"""What options a parameter group may have. Groups are dictionaries that programs write into, so they are read anew
whenever a step, or a checkpoint, is about to use them."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

STATES = (
    "float32", "bfloat16", "int8", "int4", "companded8", "int8_compensated", "int4_compensated", "companded8_compensated",
    "int4_rank1",
)  # fmt: skip
MASTERS = ("none", "float32", "split", "stochastic")


class _Kind(NamedTuple):
    holds: Callable[[Any], bool]
    give: str


def _number(value: Any) -> float:
    """NaN for what is no real number: text, truth values, tensors of several elements."""
    if isinstance(value, torch.Tensor):
        return math.nan if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool else value.item()
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan


def _are_betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(0 <= _number(beta) < 1 for beta in value)


_AT_LEAST_0 = _Kind(lambda value: 0 <= _number(value) < math.inf, "give 0 or more, a finite number")
_FINITE = _Kind(lambda value: math.isfinite(_number(value)), "give a finite number")
_BETAS = _Kind(_are_betas, "give two numbers from 0 to below 1")
_FLAG = _Kind(lambda value: isinstance(value, int) and value in (0, 1), "give True or False")
_HINT = _Kind(lambda value: value is None or _FLAG.holds(value), "give True, False or None")
_NEVER = _Kind(lambda value: not value, "give False")
_COUNT = _Kind(
    lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 0,
    "give a whole number, 0 or more",
)
_STATE = _Kind(lambda value: value in STATES, f"use one of {', '.join(STATES)}")
_MASTER = _Kind(lambda value: value in MASTERS, f"use one of {', '.join(MASTERS)}")

OF_RULES = {
    "lr": _AT_LEAST_0, "betas": _BETAS, "eps": _AT_LEAST_0, "weight_decay": _AT_LEAST_0, "amsgrad": _FLAG,
    "momentum": _AT_LEAST_0, "dampening": _FINITE, "nesterov": _FLAG, "alpha": _AT_LEAST_0, "centered": _FLAG,
    "lr_decay": _AT_LEAST_0, "initial_accumulator_value": _AT_LEAST_0, "trust_coefficient": _AT_LEAST_0,
}  # fmt: skip
"""Options by which rules are told from each other."""
_OTHERS = {
    "maximize": _FLAG, "decoupled_weight_decay": _FLAG, "foreach": _HINT, "fused": _HINT, "capturable": _NEVER,
    "differentiable": _NEVER, "state": _STATE, "master": _MASTER, "min_quantized_numel": _COUNT,
}  # fmt: skip
_KINDS = {**OF_RULES, **_OTHERS}
_MEANT = {"learningrate": "lr", "wd": "weight_decay", "epsilon": "eps", "beta1": "betas", "beta2": "betas"}


def check_options(where: str, options: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Raises ValueError if one of those that are ``expected`` is missing, or no step could compute with it."""
    for key in expected:
        if key not in options:
            if _KINDS[key] in (_HINT, _NEVER):
                continue  # torch adds some of these to defaults by itself
            raise ValueError(f"{where}: the parameter group has no {key}; put it back")
        if _KINDS[key] is _NEVER and options[key]:
            raise ValueError(f"{where}: {key}={options[key]!r} is not supported; use torch.optim's for it")
        if not _KINDS[key].holds(options[key]):
            verb = "are" if key == "betas" else "is"
            value = options[key]
            shown = f"a tensor of {value.numel()} elements" if _is_several(value) else repr(value)
            raise ValueError(f"{where}: {key} {verb} {shown}; {_KINDS[key].give}")


def check_names(where: str, options: Mapping[str, Any], expected: Collection[str]) -> None:
    """Raises ValueError if an option is probably one of those that are ``expected``, misspelt. What else a program, or a
    scheduler, keeps in a group is its own."""
    for key in options:
        if key not in expected and key not in ("params", "param_names") and (meant := _meant(key, expected)):
            raise ValueError(f"{where}: there is no option {key!r}; {meant} was probably meant: rename it")


def check_nesterov(where: str, options: Mapping[str, Any]) -> None:
    """What torch asks of options when they are given, but not when a program changes them."""
    if options.get("nesterov") and (options["momentum"] <= 0 or options["dampening"] != 0):
        raise ValueError(f"{where}: nesterov needs a momentum and no dampening")


def check_same_rule(where: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ValueError if a group that is loaded has not the options by which this one's rule is known."""
    for key in (*OF_RULES, "foreach"):  # which rules have that torch has, too; older files have it not
        if (key in saved) == (key in own) or (key == "foreach" and key not in saved):
            continue
        why = f"have {key}, which it has not" if key in saved else f"have no {key}, which it needs"
        raise ValueError(
            f"{where}: the parameter groups that are loaded {why}; they are of another optimizer: load them into the class "
            "that saved them"
        )


def _is_several(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() != 1


def _meant(key: Any, expected: Iterable[str]) -> str | None:
    if not isinstance(key, str) or key in _KINDS:
        return None
    plain = key.lower().replace("_", "").replace("-", "")
    if (meant := _MEANT.get(plain)) in expected:
        return meant
    return next((name for name in expected if _is_slip(plain, name.replace("_", ""))), None)


def _is_slip(plain: str, name: str) -> bool:
    """One letter too many, too few or another one, or two changed places; more in a long name. Short names have
    neighbours that are words (state, stage)."""
    if plain == name:
        return True
    if len(name) < 5 or abs(len(plain) - len(name)) > 2:
        return False
    begin = next((i for i, (a, b) in enumerate(zip(plain, name, strict=False)) if a != b), min(len(plain), len(name)))
    a, b = plain[begin:], name[begin:]
    if a[1:] == b or a == b[1:] or (a[:2] == b[:2][::-1] and a[2:] == b[2:]):
        return True
    return len(name) > 6 and (a[1:] == b[1:] or difflib.SequenceMatcher(None, plain, name).ratio() > 0.9)


def name_of(group: dict[str, Any], index: int) -> str:
    """Of a parameter, for a message."""
    names = group.get("param_names")
    return names[index] if names else f"parameter {index} of shape {tuple(group['params'][index].shape)}"
