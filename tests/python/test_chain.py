"""Chains in Python: profiles, schedules, runs, and the one line."""

import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import reef


def blocks(count=6, width=32):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.drop = nn.Dropout(0.2)

        def forward(self, x):
            return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))), torch.randn(64, width, requires_grad=True)


def convolutions():
    torch.manual_seed(0)
    layers = []
    for i in range(3):
        layers += [nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)), torch.randn(4, 3, 12, 12)


def step(net, x, call):
    net.zero_grad()
    x.grad = None
    before = [buffer.clone() for buffer in net.buffers()]
    torch.manual_seed(7)
    ledger = reef.Ledger()
    alive = sum(ledger.live().values())
    ledger.reset_peak()
    loss = call(x).pow(2).mean()
    loss.backward()
    peak = ledger.peak().total - alive
    left = [loss.detach(), torch.rand(3), *(p.grad.clone() for p in net.parameters()), *(b.clone() for b in net.buffers())]
    with torch.no_grad():
        for buffer, value in zip(net.buffers(), before, strict=True):
            buffer.copy_(value)
    return left, peak


@pytest.mark.parametrize("make", [blocks, convolutions])
def test_every_budget_is_the_plain_run_and_needs_what_was_predicted(make):
    net, x = make()
    plain, _ = step(net, x, net)
    net.zero_grad()
    chain = reef.Chain(net)
    profile = chain.profile(x, repeats=1)
    least, most = profile.minimum_bytes, profile.natural_peak_bytes
    assert least < most
    for part in range(5):
        budget = least + (most - least) * part // 4
        schedule = reef.plan_chain(profile, budget)
        cost = schedule.cost(profile)
        assert cost.peak_bytes <= budget
        left, peak = step(net, x, lambda x: chain.run(schedule, x, check_values=True))
        assert all(torch.equal(a, b) for a, b in zip(plain, left, strict=True)), str(schedule)
        slack = 3 * profile.stages[-1].output_bytes + 256
        assert abs(peak - cost.peak_bytes) <= 0.02 * cost.peak_bytes + slack, profile.table()


def test_profiles_and_schedules_come_back_from_json(tmp_path):
    net, x = blocks()
    profile = reef.Chain(net).profile(x, repeats=1)
    assert reef.ChainProfile.from_json(profile.json()) == profile
    schedule = reef.plan_chain(profile, profile.minimum_bytes)
    assert reef.Schedule.from_json(schedule.json()) == schedule
    assert len(schedule.cost(profile).load) == len(schedule.operations)
    schedule.save_chart(tmp_path / "schedule.svg", profile, profile.natural_peak_bytes)
    assert (tmp_path / "schedule.svg").read_text().startswith("<svg")
    assert profile.table().count("\n") == len(profile.stages) + 2
    for solver in reef.CHAIN_SOLVERS:
        assert reef.plan_chain(profile, profile.natural_peak_bytes, solver).cost(profile).recomputed_seconds >= 0


def test_what_is_wrong_is_refused():
    net, x = blocks()
    chain = reef.Chain(net)
    profile = chain.profile(x, repeats=1)
    with pytest.raises(reef.BudgetError, match=str(profile.minimum_bytes)):
        reef.plan_chain(profile, 1)
    with pytest.raises(ValueError, match="is no chain solver"):
        reef.plan_chain(profile, "1GiB", "best")
    with pytest.raises(ValueError, match="less than 0|give 0 or more"):
        reef.plan_chain(profile, -1)
    with pytest.raises(ValueError, match="is for 1 stages"):
        chain.run(reef.Schedule(1, ("T1", "L", "-a1", "B1")), x)
    with pytest.raises(ValueError, match="is no operation"):
        chain.run(reef.Schedule(6, ("X1",)), x)
    with pytest.raises(ValueError, match="without a stage"):
        reef.Chain([]).profile(x)
    with pytest.raises(ValueError):
        reef.ChainProfile.from_json("{}")


def test_a_stage_in_place_is_part_of_the_one_before():
    net, x = convolutions()
    chain = reef.Chain(net)
    assert len(chain) == len(net)
    chain.profile(x, repeats=1)
    assert len(chain) == len(net) - 4
    assert chain.names[0] == "0"
    assert chain.names[1] == "1 2"


@pytest.mark.parametrize("make", [blocks, convolutions])
def test_one_line(make):
    net, x = make()
    plain, peak = step(net, x, net)
    budget = int(peak * 0.8)
    net.zero_grad()
    plan = reef.plan_of(net, x, budget)
    assert plan.cost.peak_bytes <= budget
    assert reef.format_bytes(budget) in str(plan)
    for _ in range(2):
        left, measured = step(net, x, lambda x: reef.checkpoint_sequential(net, x, budget))
        assert all(torch.equal(a, b) for a, b in zip(plain, left, strict=True))
        assert measured <= budget * 1.02 + 3 * plan.profile.stages[-1].output_bytes
    with pytest.raises(reef.BudgetError):
        reef.checkpoint_sequential(net, x, "16B")
    with torch.no_grad():
        assert torch.equal(reef.checkpoint_sequential(net.eval(), x, "1B"), net(x))


def test_what_is_known_of_modules_goes_with_them():
    net, x = blocks(2)
    reef.checkpoint_sequential(net, x, "1GiB").sum().backward()
    gone = weakref.ref(net[0])
    del net
    gc.collect()
    assert gone() is None


def test_callables_and_a_stage_with_branches():
    weight = torch.randn(16, 16, requires_grad=True)
    stages = [lambda x: x.mm(weight).tanh(), lambda x: x.exp() + x.sin() * x, torch.sigmoid]
    x = torch.randn(8, 16, requires_grad=True)
    planned = reef.PlannedChain(stages, repeats=1)
    budget = planned.plan(x, "1MiB").profile.minimum_bytes

    def gradients(call):
        return torch.autograd.grad(call(x).sum(), [x, weight])

    plain = gradients(lambda x: stages[2](stages[1](stages[0](x))))
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(lambda x: planned(x, budget)), strict=True))


@pytest.mark.parametrize("solver", ["offload", "combined"])
def test_a_tier_takes_what_does_not_fit(solver):
    net, x = blocks(width=64)[0], torch.randn(512, 64, requires_grad=True)
    plain, _ = step(net, x, net)
    net.zero_grad()
    chain = reef.Chain(net)
    tier = reef.host_tier("1GiB")
    profile = chain.profile(x, repeats=1).with_tier(reef.TierSpeed(1e12, work_share=0.25))
    assert reef.ChainProfile.from_json(profile.json()) == profile
    schedule = reef.plan_chain(profile, profile.natural_peak_bytes * 3 // 4, solver)
    cost = schedule.cost(profile)
    assert cost.offloaded_bytes > 0 == cost.recomputed_seconds
    assert cost.tier_bytes <= profile.tier_capacity_bytes
    left, peak = step(net, x, lambda x: chain.run(schedule, x, check_values=True, tier=tier))
    assert all(torch.equal(a, b) for a, b in zip(plain, left, strict=True)), str(schedule)
    slack = 3 * profile.stages[-1].output_bytes + 2048 * len(profile.stages)
    assert abs(peak - cost.peak_bytes) <= 0.02 * cost.peak_bytes + slack
    assert 0 < tier.use().written_bytes <= cost.offloaded_bytes
    assert tier.use().used_bytes == 0
    with pytest.raises(ValueError, match="none was given"):
        chain.run(schedule, x)
    with pytest.raises(reef.BudgetError, match="has no room for"):
        chain.run(schedule, x, tier=reef.host_tier("2KiB"))


def test_one_line_with_a_tier():
    net, x = blocks(width=64)[0], torch.randn(512, 64, requires_grad=True)
    plain, peak = step(net, x, net)
    net.zero_grad()
    tier = reef.host_tier("1GiB")
    speed = tier.speed()
    assert speed.bytes_per_second > 1e6
    assert 0 <= speed.work_share <= 1
    left, measured = step(net, x, lambda x: reef.checkpoint_sequential(net, x, int(peak * 0.8), solver="offload", tier=tier))
    assert all(torch.equal(a, b) for a, b in zip(plain, left, strict=True))
    assert measured <= peak * 0.85
    assert "by way of the tier" in str(reef.plan_of(net, x, int(peak * 0.8), solver="offload", tier=tier))
    assert reef.plan_of(net, x, int(peak * 0.8), solver="offload", tier=tier).profile.tier_speed.bytes_per_second > 0


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("place", ["alone", "behind", "before", "twice"])
@pytest.mark.parametrize("way", ["run", "one line"])
def test_inside_torchs_own_checkpoint(way, place, early_stop):
    net, x = blocks(3)
    chain = reef.Chain(net)
    schedule = reef.plan_chain(profile := chain.profile(x, repeats=1), profile.minimum_bytes)
    call = {"run": lambda x: chain.run(schedule, x), "one line": lambda x: reef.checkpoint_sequential(net, x, "1GiB")}[way]
    put = {
        "alone": lambda f: f,
        "behind": lambda f: lambda x: f(x.sin()),
        "before": lambda f: lambda x: f(x).sin(),
        "twice": lambda f: lambda x: f(f(x)),
    }[place]
    plain, _ = step(net, x, put(net))
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        left, _ = step(net, x, lambda x: torch.utils.checkpoint.checkpoint(put(call), x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, left, strict=True))
