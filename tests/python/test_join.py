"""Ranks with different numbers of batches train on together, as one process that has the batches that there are
(tests/distributed/join_ranks.py is each rank)."""

from pathlib import Path

import pytest
from ranks import beside_each_other, run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "join_ranks.py")
ROWS = [(stage, ranks) for stage in (0, 1, 2, 3) for ranks in (1, 2, 3)]


@pytest.fixture(scope="module")
def runs():
    return beside_each_other(lambda row: run_ranks([PROGRAM, str(row[0])], row[1]), ROWS)


@pytest.mark.parametrize(("stage", "ranks"), ROWS)
def test_the_step_is_that_of_the_batches_that_there_are(runs, stage, ranks):
    result = runs[stage, ranks]
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)
