"""Traces, plans and their prices from Python: what a running budget recorded, and traces made by hand."""

import dataclasses

import pytest
import torch

import reef
from reef import SwapMove, SwapPlan, SwapSpeeds, Trace, TraceOperator, TracePage

SLOW = SwapSpeeds(50.0, 50.0)


def chain(layers=16, page_bytes=100):
    """Forward makes a page a layer, backward reads them last to first."""
    forward = [
        TraceOperator("forward", 1.0, {i: True, **({i - 1: False} if i else {})}) for i in range(layers)
    ]
    backward = [TraceOperator("backward", 1.0, {i: False}, (i,)) for i in reversed(range(layers))]
    return Trace(tuple(TracePage(page_bytes) for _ in range(layers)), tuple(forward + backward))


@pytest.fixture(scope="module")
def recorded():
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(6)])
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    with reef.budget(1 << 40, net, optimizer, addresses="go") as budget:
        assert budget.trace() == Trace((), ())
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(64, 96)).pow(2).mean().backward()
            optimizer.step()
        return budget.trace()


def test_the_trace_of_a_step_is_sound_and_complete(recorded):
    recorded.check()
    states = 6 * 96 * 96 * 4
    assert sum(p.bytes for p in recorded.pages if p.persistent) >= 3 * states
    assert recorded.minimum_bytes < recorded.natural_peak_bytes
    names = {op.name for op in recorded.operators}
    assert {"aten::addmm", "aten::addcdiv_"} <= names, names
    assert all(op.seconds >= 0 for op in recorded.operators)


def test_every_policy_keeps_the_budget_and_none_moves_more_than_recency_needs(recorded):
    budget = (recorded.minimum_bytes + recorded.natural_peak_bytes) // 2
    costs = {
        policy: reef.simulate(recorded, reef.plan_swaps(recorded, budget, policy), budget)
        for policy in reef.SWAP_POLICIES
    }
    assert all(cost.peak_bytes <= budget for cost in costs.values())
    assert 0 < costs["farthest"].bytes_in <= costs["recency"].bytes_in
    whole = reef.simulate(
        recorded, reef.plan_swaps(recorded, recorded.natural_peak_bytes), recorded.natural_peak_bytes
    )
    assert (whole.faults, whole.evictions, whole.bytes_in) == (0, 0, 0)


def test_a_plan_by_hand_costs_what_arithmetic_says():
    trace = chain(4)
    nothing = SwapPlan("farthest", ((),) * 8)
    assert reef.simulate(trace, nothing, 400).seconds == 8.0
    # Page 0 leaves after forward 1 (2 s), and comes back after backward 2 (2 s), in time for backward 0.
    moves = [()] * 8
    moves[1] = (SwapMove(0, "evict"),)
    moves[5] = (SwapMove(0, "fetch"),)
    cost = reef.simulate(trace, SwapPlan("farthest", tuple(moves)), 400, SLOW)
    assert (cost.evictions, cost.fetches, cost.faults) == (1, 1, 0)
    assert (cost.bytes_out, cost.bytes_in) == (100, 100)
    assert cost.stalled_seconds == pytest.approx(1.0)  # only backward 1 hides it


def test_plans_survive_the_way_to_python_and_back():
    trace = chain()
    for policy in reef.SWAP_POLICIES:
        plan = reef.plan_swaps(trace, 800, policy, SLOW)
        assert len(plan.after) in (0, len(trace.operators))
        kinds = {move.kind for moves in plan.after for move in moves}
        assert kinds <= {"evict", "fetch"}
        assert reef.simulate(trace, plan, 800, SLOW) == reef.simulate(trace, dataclasses.replace(plan), 800, SLOW)
    assert any(reef.plan_swaps(trace, 800, "farthest", SLOW).after)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda t: reef.plan_swaps(t, 199), "at least 200"),
        (lambda t: reef.plan_swaps(t, 800, "magic"), "'magic' is no policy; use one of recency, farthest"),
        (lambda t: reef.plan_swaps(t, -1), "the budget is -1"),
        (lambda t: reef.plan_swaps(t, 800, speeds=SwapSpeeds(0.0, 1.0)), "above 0"),
        (lambda t: reef.simulate(t, SwapPlan("luck"), 800), "'luck' is no demand"),
        (lambda t: reef.simulate(t, SwapPlan("recency", ((SwapMove(0, "hide"),),)), 800), "kind 'hide'"),
        (lambda t: Trace(t.pages, t.operators[:-1]).check(), "page 0"),
        (lambda t: Trace(t.pages[:-1], t.operators).check(), "page 15 does not exist"),
        (lambda t: Trace((TracePage(-1),), ()).check(), "a page's size is -1"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(call, text):
    with pytest.raises(ValueError, match=text):
        call(chain())
