"""reef.shard over NCCL with one device for each rank: every stage has the same bits as on the CPU over gloo
(shard_nccl_ranks.py runs in each rank)."""

from pathlib import Path

import pytest
import torch
from played_device import PLAYED
from ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("group", ["reef", "gloo and nccl", "nccl alone"])
@pytest.mark.parametrize("seed", [0, 10] if PLAYED else [0])
def test_every_stage_is_the_cpus(group, seed):
    result = run_ranks([str(Path(__file__).with_name("shard_nccl_ranks.py")), group, str(seed)], 2)
    assert result.ok, result.report()
    assert all("done" in rank.output for rank in result.ranks), result.report()
