"""One rank of tests/python/test_shard_state.py: a table of what can go wrong on one rank while states are put together, by
stages. In each row every rank has an error that names the rank and the reason, long before the group's timeout, nothing has
changed, and the next call works."""

import copy
import itertools
import re
import sys
import time
from collections.abc import Callable

import torch

import reef

TIMEOUT = 400.0
"""Of the group: a row that waits for it is too late."""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down = torch.nn.Linear(24, 101), torch.nn.LayerNorm(101), torch.nn.Linear(101, 24)
        self.still = torch.nn.Parameter(torch.randn(24), requires_grad=False)
        self.register_buffer("scale", torch.randn(24))

    refuses = False

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, _: int) -> None:
        if self.refuses:
            raise RuntimeError("nothing to set here")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.norm(self.up(x * self.scale))) + self.still).pow(2).mean()


def adamw(parts, **how):
    return torch.optim.AdamW(parts, lr=1e-2, **how)


def sgd(parts, **how):
    return torch.optim.SGD(parts, lr=1e-2, momentum=0.9, **how)


class Row:
    """A module that has taken a step, and what one process would have saved."""

    def __init__(self, group, stage: int, make: Callable) -> None:
        self.group, self.net = group, Net()
        self.shard = reef.shard(self.net, group, stage=stage, bucket_bytes="5KiB")
        self.make, self.optimizer = make, make(self.shard.parameters())
        self.net(torch.ones(2, 24)).backward()
        self.optimizer.step()
        self.model, self.state = self.saved()

    def saved(self) -> tuple[dict, dict]:
        return self.shard.full_state_dict(), self.shard.full_optimizer_state_dict(self.optimizer)

    def load(self, model: dict | None = None, state: dict | None = None) -> None:
        if model is not None:
            self.shard.load_state_dict(model)
        if state is not None:
            self.shard.load_optimizer_state_dict(self.optimizer, state)


ROWS: dict[str, tuple[Callable[[Row, bool], object], str]] = {}
"""What all ranks call, where the last one is `wrong`, and what is said of it."""


def row(text: str) -> Callable:
    def add(call: Callable[[Row, bool], object]) -> Callable:
        ROWS[call.__name__] = (call, text)
        return call

    return add


@row(r"none of the shard's parameters\(\)")
def another_tensor(r, wrong):
    parts = r.shard.parameters() + ([torch.zeros(3, requires_grad=True)] if wrong else [])
    r.shard.full_optimizer_state_dict(adamw(parts))


@row(r"none of the shard's parameters\(\)")
def another_tensor_to_load(r, wrong):
    parts = r.shard.parameters() + ([torch.zeros(3, requires_grad=True)] if wrong else [])
    r.shard.load_optimizer_state_dict(adamw(parts), r.state)


@row("the optimizer is AdamW on rank 0 and SGD on rank")
def another_class(r, wrong):
    r.shard.full_optimizer_state_dict((sgd if wrong else adamw)(r.shard.parameters()))


@row("the optimizer is AdamW on rank 0 and SGD on rank")
def another_class_to_load(r, wrong):
    r.shard.load_optimizer_state_dict((sgd if wrong else adamw)(r.shard.parameters()), r.state)


@row("have weight_decay 0.01 and 0.5 in group 0; build the same on every rank")
def other_options(r, wrong):
    r.shard.full_optimizer_state_dict(adamw(r.shard.parameters(), weight_decay=0.5 if wrong else 0.01))


@row("have 1 and 2 parameter groups; build the same on every rank")
def other_groups(r, wrong):
    parts = r.shard.parameters()
    r.shard.full_optimizer_state_dict(adamw([{"params": parts[:2]}, {"params": parts[2:]}] if wrong else parts))


@row("have up.bias in group 0 and, on rank .*, in group 1; make groups by")
def a_parameter_in_another_group(r, wrong):
    parts = r.shard.parameters()
    at = 1 if wrong else 2
    r.shard.full_optimizer_state_dict(adamw([{"params": parts[:at]}, {"params": parts[at:]}]))


@row("cannot be sent to other ranks")
def an_option_that_cannot_be_sent(r, wrong):
    optimizer = adamw(r.shard.parameters())
    if wrong:
        optimizer.param_groups[0]["note"] = object()
    r.shard.full_optimizer_state_dict(optimizer)


@row(r"it keeps row of shape \(1, 24\)")
def a_state_that_is_not_by_element(r, wrong):
    optimizer = adamw(r.shard.parameters())
    largest = max(r.shard.parameters(), key=torch.Tensor.numel)
    optimizer.state[largest]["row"] = torch.zeros(1, 24) if wrong else torch.zeros(largest.shape)
    r.shard.full_optimizer_state_dict(optimizer)


@row("up.weight is missing|is missing in the state that is loaded")
def a_missing_name(r, wrong):
    r.load({k: v + 1 for k, v in r.model.items() if not wrong or k != "up.weight"})


@row("has more, which the module has not")
def an_unexpected_name(r, wrong):
    r.load({**{k: v + 1 for k, v in r.model.items()}, **({"more": torch.ones(1)} if wrong else {})})


@row(r"down.weight has the shape \[24, 7\]")
def another_shape(r, wrong):
    r.load({**r.model, **({"down.weight": torch.ones(24, 7)} if wrong else {})})


@row("has 'up.weight' of NoneType")
def no_tensor(r, wrong):
    r.load({**{k: v + 1 for k, v in r.model.items()}, **({"up.weight": None} if wrong else {})})


@row("which has no imaginary parts")
def imaginary_parts(r, wrong):
    r.load({**r.model, "scale": r.model["scale"] + (1j if wrong else 1)})


@row("has the option betas, and .* has not|has the option momentum, and")
def a_state_of_another_rule(r, wrong):
    trained = [p for p in Net().parameters() if p.requires_grad]
    other = (adamw if r.make is sgd else sgd)(trained).state_dict()
    r.load(state=other if wrong else r.state)


@row("has no exp_avg_sq, which the optimizer's rule keeps")
def a_state_without_a_moment(r, wrong):
    state = copy.deepcopy(r.state)
    if wrong:
        del state["state"][0]["exp_avg_sq"]
    r.load(state=state)


@row(r"has exp_avg of the shape \[1, 24\] for a parameter of the shape \[101, 24\]")
def a_state_of_another_shape(r, wrong):
    state = copy.deepcopy(r.state)
    if wrong:
        state["state"][0]["exp_avg"] = torch.ones(1, 24)
    r.load(state=state)


@row("the optimizer has 1 parameter groups, and 2 in the state that is loaded")
def more_groups_to_load(r, wrong):
    r.load(state={**r.state, "param_groups": r.state["param_groups"] * (2 if wrong else 1)})


@row("which does not name them")
def fewer_parameters_to_load(r, wrong):
    state = copy.deepcopy(r.state)
    for group in state["param_groups"]:
        del group["param_names"]
        group["params"] = group["params"][:-1] if wrong else group["params"]
    r.load(state=state)


@row("has 6 parameters and names of 5; give it as it was saved")
def fewer_names_to_load(r, wrong):
    state = copy.deepcopy(r.state)
    if wrong:
        state["param_groups"][0]["param_names"].pop()
    r.load(state=state)


@row("the optimizer cannot take it")
def what_the_optimizer_itself_refuses(r, wrong):
    def load(state):
        type(r.optimizer).load_state_dict(r.optimizer, state)
        if wrong:
            raise RuntimeError("the optimizer cannot take it")

    r.optimizer.load_state_dict = load
    state = copy.deepcopy(r.state)
    state["param_groups"][0]["lr"] = 7.0
    try:
        r.load(state=state)
    finally:
        del r.optimizer.load_state_dict


@row("nothing to save here")
def a_module_that_cannot_be_saved(r, wrong):
    def raises(*_):
        raise RuntimeError("nothing to save here")

    hook = r.net.register_state_dict_pre_hook(raises) if wrong else None
    try:
        r.shard.full_state_dict()
    finally:
        if hook is not None:
            hook.remove()


def with_other_memory(call):
    def with_it(r, wrong):
        weight = r.net.up.weight
        own = weight.data
        if wrong:
            weight.data = torch.zeros(own.shape)
        try:
            call(r)
        finally:
            if wrong:
                weight.data = own

    with_it.__name__ = f"other_memory_{call.__name__}"
    return row("up.weight has been given other memory since")(with_it)


@with_other_memory
def to_save(r):
    r.shard.full_state_dict()


@with_other_memory
def to_load(r):
    r.load({k: v + 1 for k, v in r.model.items()})


@with_other_memory
def to_gather(r):
    r.shard.gather()


@row("nothing to set here")
def what_the_module_itself_refuses(r, wrong):
    r.net.refuses = wrong
    r.load(r.model)


@row("the rule is not made for up.weight")
def a_rule_that_fails(r, wrong):
    def rule(name, shape):
        if wrong:
            raise RuntimeError(f"the rule is not made for {name}")
        return {}

    r.shard.param_groups(rule)


@row("the rule gives up.weight .* on rank 0 and .* on rank")
def a_rule_that_depends_on_the_rank(r, wrong):
    r.shard.param_groups(lambda name, shape: {"weight_decay": 0.1 if wrong else 0.2})


@row("the rule gives None for up.weight; give a dict of options")
def a_rule_that_gives_nothing(r, wrong):
    r.shard.param_groups(lambda name, shape: None if wrong else {})


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def said_by(rank: int, error: str) -> bool:
    return error.startswith(f"rank {rank}: ")


def check_row(group, stage: int, make: Callable, name: str) -> None:
    call, text = ROWS[name]
    r = Row(group, stage, make)
    last = group.size() - 1
    where = f"{name}, stage {stage}, rank {group.rank()}"
    began = time.monotonic()
    try:
        call(r, group.rank() == last)
    except ValueError as error:
        found = error
    except RuntimeError as error:  # in its own words
        assert group.rank() == last, (where, error)
        found = error
    else:
        raise AssertionError(f"{where}: no error")
    assert time.monotonic() - began < TIMEOUT / 2, where
    assert re.search(text, str(found)), f"{where}: {found}"
    told_alike = re.search(f"on rank {last}|ranks 0 and {last}|param_groups: the rule gives up.weight .* on rank", str(found))
    assert told_alike or said_by(last, str(found)) == (group.rank() != last), f"{where}: {found}"
    model, state = r.saved()  # nothing has changed, and the ranks are together
    assert model.keys() == r.model.keys() and all(same(model[k], v) for k, v in r.model.items()), where
    assert [{**g, "params": 0} for g in state["param_groups"]] == [{**g, "params": 0} for g in r.state["param_groups"]], where
    for number, values in r.state["state"].items():
        assert all(torch.equal(state["state"][number][k], v) for k, v in values.items()), where


WHERE_DIVIDED = {
    "a_state_that_is_not_by_element", "other_memory_to_save", "other_memory_to_load", "other_memory_to_gather",
}  # fmt: skip
"""What is right where nothing is divided."""


def main() -> None:
    group = reef.init_process_group(timeout_seconds=TIMEOUT)
    for stage, name in itertools.product(range(4), ROWS):
        if stage > 0 or name not in WHERE_DIVIDED:
            check_row(group, stage, adamw, name)
    for stage in range(4):
        check_row(group, stage, sgd, "a_state_of_another_rule")
    print("done")


if __name__ == "__main__":
    sys.exit(main())
