"""Every optimizer of reef.optim, and what the tests of its laws share."""

import pytest
import torch

from reef import optim

MAKE = {
    "AdamW": lambda p, **o: optim.AdamW(p, lr=1e-2, **o),
    "Adam amsgrad": lambda p, **o: optim.Adam(p, lr=1e-2, weight_decay=0.01, amsgrad=True, **o),
    "SGD": lambda p, **o: optim.SGD(p, lr=0.1, weight_decay=0.01, **o),
    "SGD Nesterov": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "Lion": lambda p, **o: optim.Lion(p, lr=1e-3, weight_decay=0.1, **o),
    "RMSprop": lambda p, **o: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True, **o),
    "Adagrad": lambda p, **o: optim.Adagrad(p, lr=1e-2, lr_decay=0.01, initial_accumulator_value=0.1, **o),
    "LAMB": lambda p, **o: optim.LAMB(p, lr=1e-2, weight_decay=0.01, **o),
    "LARS": lambda p, **o: optim.LARS(p, lr=1.0, weight_decay=0.01, **o),
}
TORCH = {
    "AdamW": (lambda p, **o: torch.optim.AdamW(p, fused=True, **o), optim.AdamW, {"lr": 1e-2}),
    "Adam": (lambda p, **o: torch.optim.Adam(p, fused=True, **o), optim.Adam, {"weight_decay": 0.01}),
    "Adam amsgrad": (lambda p, **o: torch.optim.Adam(p, fused=True, **o), optim.Adam, {"amsgrad": True, "maximize": True}),
    "SGD": (lambda p, **o: torch.optim.SGD(p, fused=True, **o), optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD momentum": (lambda p, **o: torch.optim.SGD(p, fused=True, **o), optim.SGD,
                     {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD Nesterov": (lambda p, **o: torch.optim.SGD(p, fused=True, **o), optim.SGD,
                     {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (lambda p, **o: torch.optim.Adagrad(p, fused=True, **o), optim.Adagrad,
                {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
}  # fmt: skip
every_rule = pytest.mark.parametrize("rule", MAKE)
every_state = pytest.mark.parametrize("state", optim.STATES)

# Multiples of 16, which torch's kernels compute as vectors; beside them ours differ in no bit, theirs do.
SIZES = [(64, 96), (16,), (8192,), (3, 5, 32)]
ODD = [(63, 95), (1,), (8191,), (3, 5, 31), (0,), (257,)]


def parameters(sizes=SIZES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 10 ** (-(step % 3))).to(p.dtype)


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def states_of(optimizer):
    packed = optimizer.state_dict()["state"]
    return {(i, k): v for i, state in packed.items() for k, v in state.items()}
