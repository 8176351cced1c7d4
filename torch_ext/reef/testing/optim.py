"""What programs expect of a torch.optim.Optimizer, as laws to run on any class, ours and others'.

``python -m reef.testing.optim torch.optim.AdamW fused=true`` prints a table and exits with the number of laws broken.
From a test: ``check(torch.optim.AdamW, fused=True)`` gives the same as a list.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import importlib
import io
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

Make = Callable[..., torch.optim.Optimizer]
"""Parameters, and keywords that overrule those the class is checked with."""

_SIZES = [(65, 96), (17,), (5000,), (1,)]  # odd ones too


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one law."""

    law: str
    kept: bool
    why: str = ""
    """If it was broken: what was raised, or found."""


def _parameters(dtype: torch.dtype = torch.float32, sizes: Sequence[tuple[int, ...]] = tuple(_SIZES)) -> list:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]


def _step(optimizer: torch.optim.Optimizer, params: list, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _same_state(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(_same_state(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same_state, left, right))
    return left == right


def _resumes(make: Make, dtype: torch.dtype) -> None:
    straight, stopped, fresh = (_parameters(dtype) for _ in range(3))
    _step(make(straight), straight, 0, 6)
    first = make(stopped)
    _step(first, stopped, 0, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(fresh)
    second.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for p, q in zip(fresh, stopped, strict=True):
            p.copy_(q)
    _step(second, fresh, 3, 3)
    assert _same(straight, fresh), "another result than without the stop"


def resumes_bit_for_bit(make: Make) -> None:
    _resumes(make, torch.float32)


def resumes_bit_for_bit_with_bfloat16_parameters(make: Make) -> None:
    _resumes(make, torch.bfloat16)


def loading_keeps_the_dtypes_of_states(make: Make) -> None:
    params = _parameters(torch.bfloat16)
    one, two = make(params), make(_parameters(torch.bfloat16))
    _step(one, params, 0, 1)
    two.load_state_dict(one.state_dict())
    dtypes = [
        {k: v.dtype for k, v in s.items() if isinstance(v, torch.Tensor)}
        for o in (one, two)
        for s in o.state_dict()["state"].values()
    ]
    half = len(dtypes) // 2
    assert dtypes[:half] == dtypes[half:], "states came back in other dtypes"


def takes_float_and_tensor_lr_alike(make: Make) -> None:
    results = []
    for lr in (2.0**-7, torch.tensor(2.0**-7)):  # the same number in float32
        params = _parameters()
        optimizer = make(params, lr=lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            _step(optimizer, params, step, 1)
            schedule.step()
        results.append(params)
    assert _same(*results), "another result with a tensor for lr"


def schedulers_matter(make: Make) -> None:
    params = _parameters()
    optimizer = make(params)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    before = [p.detach().clone() for p in params]
    _step(optimizer, params, 0, 1)
    assert _same(params, before), "a scheduler set lr to 0, and parameters moved"


def groups_have_options_of_their_own(make: Make) -> None:
    params = _parameters()
    optimizer = make([{"params": params[:2]}, {"params": params[2:3], "lr": 0.0}])
    optimizer.add_param_group({"params": params[3:], "lr": 0.0})
    before = [p.detach().clone() for p in params]
    _step(optimizer, params, 0, 1)
    assert not torch.equal(params[0], before[0]) and not torch.equal(params[1], before[1])
    assert _same(params[2:], before[2:]), "a group of lr 0 moved"


def takes_named_parameters(make: Make) -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = make(net.named_parameters())
    _step(optimizer, list(net.parameters()), 0, 1)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def leaves_frozen_and_unused_alone(make: Make) -> None:
    params = _parameters()
    optimizer = make(params)
    before = [p.detach().clone() for p in params]
    params[1].requires_grad_(False)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert _same(params[1:], before[1:])


def takes_empty_parameters(make: Make) -> None:
    params = _parameters(sizes=[(8,), (0,), (3, 0)])
    _step(make(params), params, 0, 2)


def takes_transposed_parameters(make: Make) -> None:
    plain = _parameters(sizes=[(64, 96)])
    turned = [torch.nn.Parameter(plain[0].detach().t().contiguous().t())]
    start = plain[0].detach().clone()
    _step(make(plain), plain, 0, 3)
    _step(make(turned), turned, 0, 3)
    moves = [(p.detach() - start).flatten() for p in (plain[0], turned[0])]
    alike = torch.nn.functional.cosine_similarity(*moves, dim=0)
    assert alike > 0.9, f"moved another way than a contiguous one (cosine {alike:.3f})"


def a_closure_gives_its_loss(make: Make) -> None:
    params = _parameters()
    optimizer = make(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss is not None and torch.is_grad_enabled() and loss.item() > closure().item()


def hooks_run(make: Make) -> None:
    params = _parameters()
    optimizer = make(params)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    _step(optimizer, params, 0, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "saved", "loaded"], f"ran {calls}"


def an_overflow_skips_the_step_whole(make: Make) -> None:
    params = _parameters()
    optimizer = make(params)
    _step(optimizer, params, 0, 1)
    before = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    for p in params:
        p.grad = torch.ones_like(p)
    params[0].grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert _same(params, before), "parameters moved"
    for key, kept in state.items():
        now = optimizer.state_dict()["state"][key]
        for name, value in kept.items():
            assert _same_state(value, now[name]), f"state {name} changed"


def maximizes(make: Make) -> None:
    up, down = _parameters(), _parameters()
    a, b = make(up, maximize=True), make(down)
    for step in range(3):
        _step(a, up, step, 1)
        for p, q in zip(down, up, strict=True):
            p.grad = -q.grad
        b.step()
    assert _same(up, down), "another result than with the gradient negated"


def nan_is_not_swallowed(make: Make) -> None:
    params = _parameters()
    optimizer = make(params)
    _step(optimizer, params, 0, 1)
    params[2].grad[300] = torch.nan
    try:
        optimizer.step()
    except FloatingPointError:
        return  # said so: as good as showing it
    assert torch.isnan(params[2]).any(), "a NaN in a gradient left no trace"


def sparse_gradients_are_taken_or_refused(make: Make) -> None:
    table = torch.nn.Embedding(8, 4, sparse=True)
    optimizer = make(table.parameters())
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    try:
        optimizer.step()
    except Exception as error:
        assert "sparse" in str(error), f"refused without saying why: {error}"
        assert torch.equal(table.weight, before)
        return
    assert not torch.equal(table.weight, before)


def threads_do_not_matter(make: Make) -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            params = _parameters(sizes=[(300, 333), (4097,)])
            _step(make(params), params, 0, 3)
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    assert _same(results[0], results[1]) and _same(results[0], results[2]), "another result with other threads"


def bad_options_are_refused_at_once(make: Make) -> None:
    for options in ({"lr": -1.0}, {"weight_decay": -1.0}):
        try:
            make(_parameters(), **options)
        except (ValueError, RuntimeError, AssertionError):
            continue
        raise AssertionError(f"{options} were taken")


def minimizes(make: Make) -> None:
    x = torch.nn.Parameter(torch.full((5000,), 3.0))
    optimizer = make([x])
    first = x.detach().square().sum().item()
    for _ in range(200):
        optimizer.zero_grad()
        x.square().sum().backward()
        optimizer.step()
    assert x.detach().square().sum().item() < first


def deep_copies(make: Make) -> None:
    params = _parameters()
    optimizer = make(params)
    _step(optimizer, params, 0, 1)
    twin = copy.deepcopy(optimizer)
    assert twin.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


LAWS: tuple[Callable[[Make], None], ...] = (
    resumes_bit_for_bit, resumes_bit_for_bit_with_bfloat16_parameters, loading_keeps_the_dtypes_of_states,
    takes_float_and_tensor_lr_alike, schedulers_matter, groups_have_options_of_their_own, takes_named_parameters,
    leaves_frozen_and_unused_alone, takes_empty_parameters, takes_transposed_parameters, a_closure_gives_its_loss,
    hooks_run, an_overflow_skips_the_step_whole, maximizes, nan_is_not_swallowed,
    sparse_gradients_are_taken_or_refused, threads_do_not_matter, bad_options_are_refused_at_once, minimizes,
    deep_copies,
)  # fmt: skip


def check(optimizer: type[torch.optim.Optimizer], **options: Any) -> list[Outcome]:
    """Runs every law on ``optimizer(params, **options)``."""

    def make(params: Any, **overruling: Any) -> torch.optim.Optimizer:
        return optimizer(params, **{"lr": 1e-2, **options, **overruling})

    torch.ones(16).sqrt()  # MKL's first call, on one thread
    outcomes = []
    for law in LAWS:
        name = law.__name__.replace("_", " ")
        try:
            law(make)
        except Exception as error:
            said = str(error).splitlines()
            where = traceback.extract_tb(error.__traceback__)[-1]
            why = said[0] if said else f"{type(error).__name__} at line {where.lineno} of {where.name}"
            outcomes.append(Outcome(name, False, why))
        else:
            outcomes.append(Outcome(name, True))
    return outcomes


def _value(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reef.testing.optim", description=__doc__)
    parser.add_argument("optimizer", help="a class by its path: torch.optim.AdamW")
    parser.add_argument("options", nargs="*", help="key=value, for its constructor")
    given = parser.parse_args(arguments)
    module, _, name = given.optimizer.rpartition(".")
    options = {key: _value(value) for key, _, value in (option.partition("=") for option in given.options)}
    outcomes = check(getattr(importlib.import_module(module), name), **options)
    width = max(len(outcome.law) for outcome in outcomes)
    for outcome in outcomes:
        print(f"{outcome.law:<{width}}  {'kept' if outcome.kept else 'BROKEN: ' + outcome.why}")
    broken = sum(not outcome.kept for outcome in outcomes)
    print(f"{len(outcomes) - broken} of {len(outcomes)} laws kept by {given.optimizer}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
