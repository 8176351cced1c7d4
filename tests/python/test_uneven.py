"""Ranks that go separate ways, among real processes (tests/distributed/uneven_ranks.py is each rank): all are told who stands
where. No test measures time; the deadline of run_ranks is what a hang runs into."""

import functools
from pathlib import Path

import pytest
from ranks import beside_each_other, run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "uneven_ranks.py")


@functools.cache
def runs(scene: str):
    def run(row):
        stage, ranks = row
        return run_ranks([PROGRAM, scene, str(stage)], ranks)

    return beside_each_other(run, [(stage, ranks) for stage in (0, 1, 2, 3) for ranks in (2, 3)])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("scene", ["elsewhere", "late", "evaluations"])
def test_ranks_are_told_where_they_stand(scene, stage, ranks):
    ends_well(runs(scene)[stage, ranks])


def test_threads_have_no_common_order():
    ends_well(run_ranks([PROGRAM, "threads", "0"], 3))


def ends_well(result) -> None:
    assert result.ok, result.report()
    assert result.ranks[0].output.splitlines()[-1] == "done", result.report()
    told = [[line for line in rank.output.splitlines() if " of shard 1 on rank" in line or line == "done"] for rank in result.ranks]
    assert all(each == told[0] for each in told), told
