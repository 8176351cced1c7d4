"""Gradients that are not finite under every compression (tests/distributed/nonfinite_gradients_ranks.py is each rank)."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import reef

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "nonfinite_gradients_ranks.py")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("scene", ["by_shard", "by_hook"])
def test_they_are_named_and_leave_no_trace(scene, ranks):
    result = run_ranks([PROGRAM, scene], ranks)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks), result.report()


def test_where_they_arrive_as_they_are_nobody_looks_for_them():
    group = reef.init_process_group(rank=0, world_size=1)
    layer = torch.nn.Linear(3, 2)
    sharded = reef.shard(layer, group)
    with pytest.raises(ValueError, match="on a shard without a compression"):
        sharded.nonfinite_gradients()
    sharded.end()
    hook = reef.ddp_hook(DistributedDataParallel(layer, process_group=group))
    with pytest.raises(ValueError, match="on a reef::DdpHook without a compression"):
        hook.nonfinite_gradients()
    hook.close()
