"""Ranks that go separate ways, among real processes (tests/distributed/uneven_ranks.py is each rank): all are told who stands
where. No test measures time; the deadline of run_ranks is what a hang runs into."""

from pathlib import Path

import pytest
from ranks import beside_each_other, run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "uneven_ranks.py")
ROWS = [(scene, stage, ranks) for scene in ("elsewhere", "late", "evaluations") for stage in (0, 1, 2, 3) for ranks in (2, 3)]


@pytest.fixture(scope="module")
def runs():
    return beside_each_other(lambda row: run_ranks([PROGRAM, row[0], str(row[1])], row[2], grace=300), [*ROWS, ("threads", 0, 3)])


@pytest.mark.parametrize(("scene", "stage", "ranks"), [*ROWS, ("threads", 0, 3)])
def test_ranks_are_told_where_they_stand(runs, scene, stage, ranks):
    result = runs[scene, stage, ranks]
    assert result.ok, result.report()
    assert result.ranks[0].output.splitlines()[-1] == "done", result.report()
    told = [[line for line in rank.output.splitlines() if "out of step" in line or line == "done"] for rank in result.ranks]
    assert all(each == told[0] for each in told), told
