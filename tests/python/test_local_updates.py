"""LocalUpdates among real processes (tests/distributed/local_updates_ranks.py is each rank): as one process, resumed, and where
ranks are gone or out of step."""

from pathlib import Path

import pytest
from ranks import beside_each_other, run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "local_updates_ranks.py")
ROWS = [("trains", 1), ("trains", 2), ("trains", 3), ("compressed", 1), ("compressed", 3), ("copies", 4), ("finishes", 2),
        ("finishes", 3), ("saves", 2), ("saves", 3)]  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    return beside_each_other(lambda row: run_ranks([PROGRAM, row[0]], row[1]), ROWS)


@pytest.mark.parametrize(("scene", "ranks"), ROWS)
def test_every_rank_ends_as_it_should(runs, scene, ranks):
    result = runs[scene, ranks]
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks), result.report()


def test_a_rank_that_is_killed_is_named():
    result = run_ranks([PROGRAM, "killed"], 3)
    assert [rank.ok for rank in result.ranks] == [True, True, False], result.report()
    assert result.ranks[2].signal == 9, result.report()
