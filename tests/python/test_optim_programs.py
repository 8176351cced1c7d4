"""Programs at random: steps, options that change, gradients that are missing, skipped steps, copies, checkpoints there and
back, groups added later, and faults that are refused. The oracle is torch's fused step, one optimizer for each parameter, bit
for bit; a program that fails is made shorter until every statement of it is needed."""

import copy
import io
import random

import pytest
import torch

from reef import optim

PROGRAMS = 150  # of each rule
STATEMENTS = 14
SIZES = [(16,), (32, 16), (4, 4, 4), (160,)]
RULES = {
    "adam": (torch.optim.Adam, optim.Adam),
    "adamw": (torch.optim.AdamW, optim.AdamW),
    "sgd": (torch.optim.SGD, optim.SGD),
    "adagrad": (torch.optim.Adagrad, optim.Adagrad),
}
VALUES = {
    "lr": [0.1, 0.01, 0.0], "weight_decay": [0.0, 0.1], "maximize": [True, False], "betas": [(0.9, 0.99), (0.5, 0.9), (0.0, 0.5)],
    "eps": [1e-8, 1e-3], "amsgrad": [True, False], "momentum": [0.0, 0.5, 0.9], "dampening": [0.0, 0.3],
    "nesterov": [True, False], "lr_decay": [0.0, 0.1],
}  # fmt: skip
BAD = {"lr": ["1", -1.0, None], "weight_decay": [float("nan")], "betas": [(0.9,), 0.9], "momentum": ["0.9", -1.0], "eps": [-1.0]}


def statement(rng, keys):
    kind = rng.choice(["step"] * 6 + ["set"] * 4 + ["skip", "resume", "by way of torch", "copy", "fault", "damage", "grow"])
    key = rng.choice([key for key in keys if key in (BAD if kind == "fault" else VALUES)])
    value = rng.choice((BAD if kind == "fault" else VALUES)[key])
    return kind, rng.randrange(1 << 30), key, value


class Run:
    """Of one program: ours, and torch's beside it."""

    def __init__(self, rule):
        self.theirs, self.ours = RULES[rule]
        self.params, self.others, self.oracles = [], [], []
        self.optimizer = None
        self.grow(0)

    def grow(self, seed):
        if len(self.params) == len(SIZES):
            return
        size = SIZES[len(self.params)]
        value = torch.randn(size, generator=torch.Generator().manual_seed(len(self.params)))
        p, q = torch.nn.Parameter(value.clone()), torch.nn.Parameter(value.clone())
        self.params.append(p)
        self.others.append(q)
        if self.optimizer is None:
            self.optimizer = self.ours([p], lr=0.1)
        else:
            self.optimizer.add_param_group({"params": [p], "lr": 0.1})
        self.oracles.append(self.theirs([q], lr=0.1, fused=True))

    def give(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for i, (p, q) in enumerate(zip(self.params, self.others, strict=True)):
            grad = torch.randn(p.shape, generator=generator)
            there = (seed >> i) & 3 != 0
            p.grad, q.grad = (grad, grad.clone()) if there else (None, None)

    def may_set(self, key, value):
        """torch raises KeyError if amsgrad comes later, and so does this refuse it: a law of its own."""
        return key != "amsgrad" or not value or not any(q.state for q in self.oracles)

    def execute(self, kind, seed, key, value):
        if kind == "step":
            self.give(seed)
            self.optimizer.step()
            for oracle in self.oracles:
                oracle.step()
        elif kind == "skip":
            self.give(seed)
            self.optimizer.found_inf = torch.ones(())
            self.optimizer.step()
            del self.optimizer.found_inf
        elif kind == "set" and self.may_set(key, value):
            which = seed % len(self.params)
            self.optimizer.param_groups[which][key] = value
            self.oracles[which].param_groups[0][key] = value
        elif kind in ("resume", "by way of torch"):
            self.resume(self.optimizer.state_dict() if kind == "resume" else self.optimizer.torch_state_dict())
        elif kind == "copy":
            self.optimizer = copy.deepcopy(self.optimizer)
            self.params = [group["params"][0] for group in self.optimizer.param_groups]
        elif kind == "fault":
            which = seed % len(self.params)
            group = self.optimizer.param_groups[which]
            good, group[key] = group[key], value
            self.give(seed)
            with pytest.raises(ValueError, match=key):
                self.optimizer.step()
            group[key] = good
        elif kind == "damage":
            self.damage(seed)
        elif kind == "grow":
            self.grow(seed)
        return all(torch.equal(p, q) for p, q in zip(self.params, self.others, strict=True))

    def resume(self, state_dict):
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        self.optimizer = self.ours([{"params": [p]} for p in self.params], lr=9.0)
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))

    def damage(self, seed):
        given = copy.deepcopy(self.optimizer.state_dict())
        states = [s for s in given["state"].values() if len(s) > 1]
        if not states:
            return
        state = states[seed % len(states)]
        name = sorted(set(state) - {"step"})[seed % (len(state) - 1)]
        state[name] = [torch.ones(1), state[name].double(), state[name][None], "none"][seed % 4]
        with pytest.raises(ValueError, match=name):
            self.optimizer.load_state_dict(given)


def fails(rule, program):
    run = Run(rule)
    for i, step in enumerate(program):
        try:
            if not run.execute(*step):
                return f"another result after {i}: {step}"
        except Exception as error:
            return f"{type(error).__name__} in {i}: {step}: {error}"
    return None


def shrunk(rule, program):
    shorter = True
    while shorter:
        shorter = next((s for i in range(len(program)) if fails(rule, s := program[:i] + program[i + 1 :])), None)
        program = shorter or program
    return program


@pytest.mark.parametrize("rule", RULES)
def test_programs_at_random(rule):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's threads cut vectors in two
    try:
        keys = [key for key in VALUES if key in RULES[rule][1]([torch.nn.Parameter(torch.zeros(1))]).defaults]
        for seed in range(PROGRAMS):
            rng = random.Random(seed)
            program = [statement(rng, keys) for _ in range(STATEMENTS)]
            if fails(rule, program):
                program = shrunk(rule, program)
                pytest.fail(f"{fails(rule, program)}\n" + "\n".join(map(str, program)))
    finally:
        torch.set_num_threads(threads)
