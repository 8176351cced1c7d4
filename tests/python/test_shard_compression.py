"""Gradients that reef.shard holds back (compression), saved by some ranks and loaded by another number of them
(tests/distributed/shard_compression_ranks.py is each rank)."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import reef

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "shard_compression_ranks.py")


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (4, 2), (3, 1), (1, 2)])
def test_another_number_of_ranks_loses_nothing(saved_by, loaded_by, tmp_path):
    for ranks, arguments in ((saved_by, ["save", str(tmp_path)]), (loaded_by, ["load", str(tmp_path), str(saved_by)])):
        result = run_ranks([PROGRAM, *arguments], ranks)
        assert result.ok, result.report()
        assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


def test_what_is_wrong_is_refused():
    layer = torch.nn.Linear(30, 20)
    group = reef.init_process_group(rank=0, world_size=1)
    with pytest.raises(ValueError, match="compression 'topk' is not \"none\" or \"bfloat16\""):
        reef.shard(layer, group, compression="topk")
    with pytest.raises(ValueError, match="a compression and sum_order kNative"):
        reef.shard(layer, group, compression="bfloat16", sum_order="native")
    with pytest.raises(ValueError, match="is of Half, and a compression"):
        reef.shard(layer, group, compression="bfloat16", mixed_precision=torch.float16)

    sharded = reef.shard(layer, group)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    state = sharded.full_optimizer_state_dict(optimizer)
    assert "communication" not in state
    held_back = {"weight": {"residual": torch.ones(20, 30)}}
    state["communication"] = {"method": "bfloat16", "ranks": 1, "numbers": {}, "of_ranks": {0: held_back}}
    with pytest.raises(ValueError, match="by compression bfloat16, and this shard has compression none"):
        sharded.load_optimizer_state_dict(optimizer, state)
    sharded.end()

    # One rank sends nothing, so it applies what other ranks have held back, and holds nothing back itself.
    sharded = reef.shard(layer, group, compression="bfloat16")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    sharded.load_optimizer_state_dict(optimizer, state)
    kept = sharded.sharded_optimizer_state_dict(optimizer)["communication"]
    assert torch.equal(kept["of_ranks"][0]["weight"]["residual"], torch.ones(20, 30))
    (layer.weight.sum() + layer.bias.sum()).mul(0).backward()
    optimizer.step()
    assert torch.equal(layer.weight.detach(), before - 1)
    assert not sharded.full_optimizer_state_dict(optimizer)["communication"]["of_ranks"][0]
    sharded.end()
