"""Collectives of torch.distributed inside a budget: what a Work is working on stays where it is until it is over."""

import sys
from pathlib import Path

import pytest
from ranks import run_ranks

PROGRAM = str(Path(__file__).with_name("budget_ranks.py"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_asynchronous_collectives_are_right(ranks):
    result = run_ranks([sys.executable, PROGRAM, "collectives"], ranks)
    assert result.ok, result.report()
    assert all("collectives are right" in rank.output for rank in result.ranks)


@pytest.mark.parametrize("part", [0.8, 0.6])
def test_ddp_trains_unmodified(part):
    result = run_ranks([sys.executable, PROGRAM, "ddp", str(part)], 2)
    assert result.ok, result.report()
    assert all("ddp is equal" in rank.output for rank in result.ranks)
