"""How often the program waits for its device in a step of reef.shard: only where the host reads what is there, once, and never
for each bucket (shard_waits_ranks.py is each rank)."""

from pathlib import Path

import pytest
from played_device import PLAYED
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not PLAYED, reason="needs played CUDA devices")


@pytest.mark.parametrize(
    ("group", "ranks", "seed"),
    [("alone", 1, 0), ("reef", 2, 10), ("gloo and nccl", 2, 0), ("nccl alone", 2, 10)],
)
def test_a_step_waits_where_the_host_reads(group, ranks, seed):
    result = run_ranks([str(Path(__file__).with_name("shard_waits_ranks.py")), group, str(seed)], ranks)
    assert result.ok, result.report()
    assert all("done" in rank.output for rank in result.ranks), result.report()
