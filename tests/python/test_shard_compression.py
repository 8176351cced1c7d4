"""Gradients that reef.shard holds back (compression), saved by some ranks and loaded by another number of them
(tests/distributed/shard_compression_ranks.py is each rank)."""

import random
from pathlib import Path

import compressions
import pytest
import torch
from ranks import beside_each_other, run_ranks

import reef

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "shard_compression_ranks.py")


@pytest.mark.parametrize(
    ("method", "saved_by", "loaded_by"),
    [("bfloat16", 2, 3), ("bfloat16", 4, 2), ("bfloat16", 3, 1), ("bfloat16", 1, 2), ("float16", 2, 3), ("sign", 3, 2), ("sign", 2, 4),
     ("powersgd", 2, 3), ("powersgd", 4, 2), ("powersgd_alternating", 3, 2), ("oktopk", 3, 2), ("oktopk", 2, 3), ("dgc", 2, 3), ("dgc", 4, 2), ("dgc", 1, 2), ("dgc", 3, 1)],
)
def test_another_number_of_ranks_loses_nothing(method, saved_by, loaded_by, tmp_path):
    for ranks, arguments in ((saved_by, ["save", method, str(tmp_path)]), (loaded_by, ["load", method, str(tmp_path), str(saved_by)])):
        result = run_ranks([PROGRAM, *arguments], ranks)
        assert result.ok, result.report()
        assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


def test_a_rank_that_is_killed_within_an_exchange_is_named_by_every_method():
    """At a moment of chance, which a report says."""
    rows = [(name, random.randrange(3), round(random.uniform(0, 0.4), 4)) for name in compressions.names()]
    for first in range(0, len(rows), 3):
        runs = beside_each_other(lambda row: run_ranks([PROGRAM, "killed", *map(str, row)], 3), rows[first : first + 3])
        for row, result in runs.items():
            victim = row[1]
            assert result.ranks[victim].signal == 9, f"{row}: {result.report()}"
            survivors = [rank for rank in result.ranks if rank.rank != victim]
            assert all(rank.ok and rank.output.splitlines()[-1] == "done" for rank in survivors), f"{row}: {result.report()}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_an_entropy_code_changes_nothing_but_bytes(ranks):
    result = run_ranks([PROGRAM, "entropy_coded", "qsgd"], ranks)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


def test_what_is_wrong_is_refused():
    layer = torch.nn.Linear(30, 20)
    group = reef.init_process_group(rank=0, world_size=1)
    with pytest.raises(ValueError, match="compression 'top-k' is none of \"none\", \"auto\", \"bfloat16\", \"float16\", \"qsgd\", \"sign\", \"powersgd\""):
        reef.shard(layer, group, compression="top-k")
    with pytest.raises(ValueError, match="bits 9: give a whole number from 2 to 8"):
        reef.shard(layer, group, compression=reef.Compression("qsgd", bits=9))
    with pytest.raises(ValueError, match="entropy_coded 2: give a whole number from 0 to 1"):
        reef.shard(layer, group, compression=reef.Compression("qsgd", entropy_coded=2))
    with pytest.raises(ValueError, match="entropy_coded, which compression sign does not take"):
        reef.shard(layer, group, compression=reef.Compression("sign", entropy_coded=True))
    with pytest.raises(ValueError, match="seed with a schedule: give one number"):
        reef.shard(layer, group, compression=reef.Compression("qsgd", seed={0: 1, 5: 2}))
    with pytest.raises(ValueError, match="rank 0: give a whole number from 1 to 65536"):
        reef.shard(layer, group, compression=reef.Compression("powersgd", rank=0))
    with pytest.raises(ValueError, match="bits, which compression sign does not take"):
        reef.shard(layer, group, compression=reef.Compression("sign", bits=8))
    with pytest.raises(ValueError, match="momentum 1: give a number from 0 to less than 1"):
        reef.shard(layer, group, compression=reef.Compression("dgc", momentum=1))
    with pytest.raises(ValueError, match="max_norm 0: give a number above 0"):
        reef.shard(layer, group, compression=reef.Compression("dgc", max_norm=0))
    with pytest.raises(ValueError, match="bits, which compression oktopk does not take"):
        reef.shard(layer, group, compression=reef.Compression("oktopk", density=0.1, bits=8))
    for method in ("topk", "auto"):
        with pytest.raises(ValueError, match=f"momentum, which compression {method} does not take"):
            reef.shard(layer, group, compression=reef.Compression(method, momentum=0.9))
    with pytest.raises(ValueError, match="has gradients of Double, and compression dgc, whose momentum is of float32"):
        reef.shard(torch.nn.Linear(3, 2).double(), group, compression="dgc")
    plain = reef.shard(layer, group)
    with pytest.raises(ValueError, match="has a momentum of its own, and outer_momentum 0.9: give outer_momentum 0"):
        reef.LocalUpdates(plain, local_steps=2, compression="dgc")
    plain.end()
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
    with pytest.raises(ValueError, match="by compression bfloat16, and gradients are exchanged here by compression none"):
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


def test_on_one_rank_dgc_is_an_optimizer_with_momentum():
    group = reef.init_process_group(rank=0, world_size=1)
    torch.manual_seed(0)
    plain, layer = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
    layer.load_state_dict(plain.state_dict())
    sharded = reef.shard(layer, group, stage="gradients", compression=reef.Compression("dgc", momentum={0: 0.5, 2: 0.9}))
    optimizers = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5), torch.optim.SGD(sharded.parameters(), lr=0.1)
    for step in range(4):
        batch = torch.randn(4, 30)
        optimizers[0].param_groups[0]["momentum"] = 0.5 if step < 2 else 0.9
        for module, optimizer in zip((plain, layer), optimizers, strict=True):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    sharded.gather()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True))
    momentum = sharded.full_optimizer_state_dict(optimizers[1])["communication"]["of_ranks"][0]["weight"]["momentum_of_rank"]
    assert torch.equal(momentum, optimizers[0].state[plain.weight]["momentum_buffer"])
    sharded.end()
