"""reef.checkpoint against the plain call, bit for bit, and beside torch's own."""

import gc

import pytest
import torch
from torch import nn

import reef


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x, *, scale=1.0, mask=None):
        self.calls += 1
        y = self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x))))) * scale
        return x + (y if mask is None else y * mask["keep"])


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.layers(x)


def step(module, x, call):
    module.zero_grad()
    x.grad = None
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    torch.manual_seed(7)
    loss = call(module, x).float().pow(2).mean()
    loss.backward()
    left = [loss.detach(), torch.rand(3), *(p.grad.clone() for p in module.parameters()), *(b.clone() for b in module.buffers())]
    if x.requires_grad:
        left.append(x.grad.clone())
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
    return left


CASES = {
    "block": (Block, lambda: torch.randn(8, 16, requires_grad=True), {}),
    "input without a gradient": (Block, lambda: torch.randn(8, 16), {}),
    "keywords": (Block, lambda: torch.randn(8, 16, requires_grad=True), {"scale": 2.0, "mask": {"keep": torch.ones(16)}}),
    "statistics": (Statistics, lambda: torch.randn(4, 3, 6, 6, requires_grad=True), {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("check_values", [False, True])
def test_leaves_what_the_plain_call_leaves(case, check_values):
    torch.manual_seed(0)
    make, inputs, keywords = CASES[case]
    module, x = make(), inputs()
    plain = step(module, x, lambda m, x: m(x, **keywords))
    ours = step(module, x, lambda m, x: reef.checkpoint(m, x, check_values=check_values, **keywords))
    nested = step(module, x, lambda m, x: reef.checkpoint(lambda x: reef.checkpoint(m, x, **keywords), x))
    for other in (ours, nested):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("order", ["ours inside", "ours outside"])
def test_nests_with_torchs_own(order):
    torch.manual_seed(0)
    module, x = Block(), torch.randn(8, 16, requires_grad=True)
    plain = step(module, x, lambda m, x: m(x))
    torchs = lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)  # noqa: E731
    if order == "ours inside":
        both = lambda m, x: torchs(lambda x: reef.checkpoint(m, x), x)  # noqa: E731
    else:
        both = lambda m, x: reef.checkpoint(lambda x: torchs(m, x), x)  # noqa: E731
    assert all(torch.equal(a, b) for a, b in zip(plain, step(module, x, both), strict=True))


def test_save_on_cpu_around_and_inside():
    torch.manual_seed(0)
    module, x = Block(), torch.randn(8, 16, requires_grad=True)
    plain = step(module, x, lambda m, x: m(x))

    def around(m, x):
        with torch.autograd.graph.save_on_cpu():
            return reef.checkpoint(m, x)

    def inside(m, x):
        def saved(x):
            with torch.autograd.graph.save_on_cpu():
                return m(x)

        return reef.checkpoint(saved, x)

    for call in (around, inside):
        assert all(torch.equal(a, b) for a, b in zip(plain, step(module, x, call), strict=True))


def test_keeps_inputs_only_and_runs_once_more():
    module, x = Block().eval(), torch.randn(64, 16, requires_grad=True)  # dropout would keep the generator's state
    ledger = reef.Ledger()
    gc.collect()
    before = sum(ledger.live().values())
    y = reef.checkpoint(module, x)
    factor = 8  # a number that a tensor is multiplied by, which torch shows to no hook
    assert sum(ledger.live().values()) - before == y.nbytes + factor
    assert module.calls == 1
    y.sum().backward()
    assert module.calls == 2


def test_functions_are_forgotten_with_their_graph():
    from reef import _function

    gc.collect()
    before = len(_function._functions)
    y = reef.checkpoint(torch.exp, torch.ones(3, requires_grad=True))
    assert len(_function._functions) == before + 1
    y.sum().backward()
    del y
    gc.collect()
    assert len(_function._functions) == before


def test_grad_retained_graph_and_double_backward():
    x = torch.randn(5, 5, requires_grad=True)

    def function(x):
        return x.mm(x).tanh().mm(x).sin()

    def twice(call):
        y = call(x).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x)
        return first, second, again

    for a, b in zip(twice(function), twice(lambda x: reef.checkpoint(function, x)), strict=True):
        assert torch.equal(a, b)


def test_what_a_function_raises_keeps_its_type():
    calls = []

    def function(x):
        calls.append(1)
        y = x.exp()
        if len(calls) == 2:
            raise KeyError("no")
        return y.sin()

    y = reef.checkpoint(function, torch.ones(3, requires_grad=True))
    with pytest.raises(KeyError, match="no"):
        y.sum().backward()


def test_another_result_is_refused():
    calls = []

    def other_shape(x):
        calls.append(1)
        return (x if len(calls) == 1 else x.repeat(2)).exp()

    y = reef.checkpoint(other_shape, torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="saved tensor 1 of 1 is"):
        y.sum().backward()

    def other_values(x):
        calls.append(1)
        return (x * len(calls)).exp()

    y = reef.checkpoint(other_values, torch.ones(3, requires_grad=True), check_values=True)
    with pytest.raises(RuntimeError, match="has other values"):
        y.sum().backward()

    weight = torch.ones(3)
    y = reef.checkpoint(lambda x: x * weight, torch.ones(3, requires_grad=True))
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        y.sum().backward()


def test_without_gradients_it_is_the_plain_call():
    module = Block()
    with torch.no_grad():
        assert not reef.checkpoint(module, torch.randn(8, 16)).requires_grad
    assert module.calls == 1
