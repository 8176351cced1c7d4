"""What becomes of a module that changes after reef.shard (tests/distributed/shard_module_ranks.py is each rank)."""

from pathlib import Path

import pytest
from ranks import run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "shard_module_ranks.py")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_is_as_one_process_or_told_on_every_rank(ranks):
    result = run_ranks([PROGRAM], ranks)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)
