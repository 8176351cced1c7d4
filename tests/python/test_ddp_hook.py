"""reef.ddp_hook among real processes (tests/distributed/ddp_hook_ranks.py is each rank): bit for bit reef.shard, for every
compression by which a gradient arrives."""

from pathlib import Path

import pytest
from ranks import beside_each_other, run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "ddp_hook_ranks.py")
ROWS = [("equals", 1), ("equals", 2), ("equals", 3), ("equals", 4), ("unused", 1), ("unused", 3), ("conserves", 2), ("conserves", 4),
        ("resumes", 1), ("resumes", 3), ("refuses", 1), ("refuses", 2), ("own_group", 2), ("chooses", 1), ("chooses", 2),
        ("fails", 3), ("leaves", 3)]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = {row: str(tmp_path_factory.mktemp(row[0])) for row in ROWS}  # not by several threads

    def run_one(row):
        return run_ranks([PROGRAM, row[0], folders[row]], row[1])

    return {row: found for first in range(0, len(ROWS), 4) for row, found in beside_each_other(run_one, ROWS[first : first + 4]).items()}


@pytest.mark.parametrize(("scene", "ranks"), ROWS)
def test_every_rank_ends_as_it_should(runs, scene, ranks):
    result = runs[scene, ranks]
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks), result.report()


def test_a_rank_that_is_killed_is_named(tmp_path):
    result = run_ranks([PROGRAM, "killed", str(tmp_path)], 3)
    assert [rank.ok for rank in result.ranks] == [True, True, False], result.report()
    assert result.ranks[2].signal == 9, result.report()
