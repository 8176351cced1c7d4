"""Inputs of another size at nearly every step: few are profiled, all are bit for bit the plain run and within their bytes, and
where bytes grow as nobody thought, that is said."""

import warnings

import pytest
import torch
from torch import nn

import reef


class Block(nn.Module):
    calls = 0

    def __init__(self, width=32):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        Block.calls += 1
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.feed(self.after(x))


LENGTHS = [40 + i * 29 % 83 for i in range(24)]
SHAPES = {
    "any length": [(4, length) for length in LENGTHS],
    "rising": [(4, 40 + 3 * i) for i in range(24)],
    "falling": [(4, 110 - 3 * i) for i in range(24)],
    "a batch that is smaller now and then": [(4 if i % 5 else 3, length) for i, length in enumerate(LENGTHS)],
    "as many tokens": [(360 // length, length) for length in sorted(LENGTHS)],
}


def network(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def step(net, x, call):
    net.zero_grad()
    ledger = reef.Ledger()
    alive = sum(ledger.live().values())
    ledger.reset_peak()
    y = call(x)
    y.pow(2).mean().backward()
    return [y.detach(), *(p.grad for p in net.parameters())], ledger.peak().total - alive


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_every_step_is_the_plain_one_within_its_bytes_and_few_are_profiled(shapes, share):
    net = network()
    extremes = [max(SHAPES[shapes], key=lambda shape: shape[0] * shape[1] ** power) for power in (1, 2)]
    profiles = [reef.Chain(net).profile(torch.randn(*shape, 32), repeats=1) for shape in extremes]
    least, most = max(p.minimum_bytes for p in profiles), max(p.natural_peak_bytes for p in profiles)
    within = int(least + share * (most - least))
    calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, shape in enumerate(SHAPES[shapes]):
            x = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(i))
            plain, _ = step(net, x, net)
            Block.calls = 0
            ours, peak = step(net, x, lambda x: reef.checkpoint_sequential(net, x, within))
            calls += Block.calls
            assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)), shape
            assert peak <= within * 1.02 + 4 * x.nbytes + 2048, shape
    # A profile is 12 forward passes of a block. Where hardly anything fits, a bound often does not.
    assert calls / len(SHAPES[shapes]) / len(net) < (8 if share > 0 else 12)


def test_a_plan_says_that_it_is_priced_and_a_profile_can_be_asked_for():
    net = network(3)
    for length in (40, 80):
        assert not reef.plan_of(net, torch.randn(2, length, 32), "1GiB").is_priced
    between = torch.randn(2, 60, 32)
    plan = reef.plan_of(net, between, "1GiB")
    truth = reef.plan_of(net, between, "1GiB", price_sizes=False)
    assert plan.is_priced
    assert "priced from other sizes" in str(plan)
    assert not truth.is_priced
    for bound, exact in zip(plan.profile.stages, truth.profile.stages, strict=True):
        for name in ("output_bytes", "tape_bytes", "forward_bytes", "taped_bytes", "retape_bytes", "backward_bytes", "gradient_bytes"):
            assert getattr(exact, name) <= getattr(bound, name) <= 1.25 * getattr(exact, name) + 64, name
    planned = reef.PlannedChain(net, price_sizes=False)
    for length in (40, 60, 80):
        assert not planned.plan(torch.randn(2, length, 32), "1GiB").is_priced


def test_where_the_bound_does_not_fit_the_truth_may():
    net = network(3)
    shorter, x = torch.randn(2, 70, 32), torch.randn(2, 78, 32)
    exact = reef.plan_of(net, x, "1GiB", price_sizes=False).profile.minimum_bytes
    reef.plan_of(net, shorter, "1GiB")
    assert reef.plan_of(net, x, "1GiB").is_priced
    assert reef.plan_of(net, x, "1GiB").profile.minimum_bytes > exact
    assert not reef.plan_of(net, x, exact).is_priced
    with pytest.raises(reef.BudgetError, match=str(exact)):
        reef.checkpoint_sequential(net, x, exact - 1)


def test_other_layers_modes_and_kinds_of_input_are_not_priced_from():
    net = network(2)
    reef.plan_of(net, torch.randn(2, 50, 32), "1GiB")
    x = torch.randn(2, 52, 32)
    assert reef.plan_of(net, x, "1GiB").is_priced
    assert not reef.plan_of(net, x.clone().requires_grad_(), "1GiB").is_priced
    assert not reef.plan_of(net, torch.randn(52, 2, 32).transpose(0, 1), "1GiB").is_priced
    net[0].requires_grad_(False)
    assert not reef.plan_of(net, x, "1GiB").is_priced
    net[0].requires_grad_(True)
    assert not reef.plan_of(net.eval(), x, "1GiB").is_priced
    net.train()[1] = Block()
    assert not reef.plan_of(net, x, "1GiB").is_priced


class Steep(nn.Module):
    """Its bytes grow with the fourth power of the length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        Block.calls += 1
        h = self.linear(x).tanh()
        cubes = h[0, :, 0].view(-1, 1, 1, 1) * torch.ones(len(h[0]), len(h[0]), len(h[0]) // 4)
        return h + cubes.sin().mean()


def test_bytes_that_grow_faster_are_noticed_and_then_each_size_is_profiled():
    torch.manual_seed(0)
    net = nn.Sequential(*(Steep() for _ in range(4)))
    within = int(reef.Chain(net).profile(torch.randn(1, 40, 32)).natural_peak_bytes * 1.28)
    reef.checkpoint_sequential(net, torch.randn(1, 40, 32), within).sum().backward()
    x = torch.randn(1, 45, 32)
    plain, _ = step(net, x, net)
    plain = [each.clone() for each in plain]
    net.zero_grad()
    assert reef.plan_of(net, x, within).is_priced
    with pytest.warns(UserWarning, match=r"sizes \[1, 45, 32\], .* were alive at once where .* priced from inputs of other sizes"):
        ours, _ = step(net, x, lambda x: reef.checkpoint_sequential(net, x, within))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (45, 44, 46):
            x = torch.randn(1, length, 32)
            net.zero_grad()
            assert not reef.plan_of(net, x, within).is_priced
            _, peak = step(net, x, lambda x: reef.checkpoint_sequential(net, x, within))
            assert peak <= within * 1.02 + 4 * x.nbytes + 4096


def test_stages_that_need_more_than_when_they_were_profiled_are_noticed_and_profiled_once_more():
    class Hidden(nn.Module):
        width = 8

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(x.repeat(1, Hidden.width, 1)).tanh().mean(1, keepdim=True) + x

    torch.manual_seed(0)
    net, x = nn.Sequential(*(Hidden() for _ in range(4))), torch.randn(64, 1, 32)
    within = reef.Chain(net).profile(x).natural_peak_bytes
    step(net, x, lambda x: reef.checkpoint_sequential(net, x, within))
    Hidden.width = 14
    with pytest.warns(UserWarning, match="do not do what they did when they were profiled"):
        step(net, x, lambda x: reef.checkpoint_sequential(net, x, within))
    _, peak = step(net, x, lambda x: reef.checkpoint_sequential(net, x, within))
    assert peak <= within * 1.02 + 4 * x.nbytes + 4096
