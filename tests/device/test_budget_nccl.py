"""A budget for a device, while NCCL works on its tensors asynchronously (budget_nccl_ranks.py runs in each rank)."""

from pathlib import Path

import pytest
from played_device import PLAYED
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not PLAYED, reason="needs played CUDA devices")


@pytest.mark.parametrize("group", ["torch", "reef"])
@pytest.mark.parametrize("seed", [1, 2])
def test_collectives_beside_the_program_read_and_write_what_they_were_given(group, seed):
    result = run_ranks([str(Path(__file__).with_name("budget_nccl_ranks.py")), group, str(seed)], 2)
    assert result.ok, result.report()
    assert all("done" in rank.output for rank in result.ranks), result.report()
