"""reef.optim.OneBitAdam over reef.Compression("one_bit_adam") (tests/distributed/one_bit_adam_ranks.py is each rank)."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import reef

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "one_bit_adam_ranks.py")


def run(ranks, *arguments):
    result = run_ranks([PROGRAM, *arguments], ranks)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (3, 2), (4, 3)])
def test_its_loss_is_adams_within_2_percent(ranks, stage):
    run(ranks, "train", str(stage))


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(3, 2), (2, 4), (2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_momentum(saved_by, loaded_by, tmp_path):
    run(saved_by, "save", str(tmp_path))
    run(loaded_by, "load", str(tmp_path))


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (3, 1), (2, 2), (4, 3)])
def test_what_else_a_shard_can_do_is_as_ever(ranks, stage):
    run(ranks, "together", str(stage))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_has_been_changed_is_not_stepped(ranks):
    run(ranks, "changed")


def test_neither_is_used_without_the_other():
    group = reef.init_process_group(rank=0, world_size=1)
    layer = torch.nn.Linear(30, 20)
    with pytest.raises(ValueError, match="is of no shard with compression one_bit_adam"):
        reef.optim.OneBitAdam(layer.parameters())
    with pytest.raises(ValueError, match="without warmup_steps"):
        reef.Compression("one_bit_adam")
    with pytest.raises(ValueError, match="warmup_steps, which compression sign does not take"):
        reef.Compression("sign", warmup_steps=3)
    sharded = reef.shard(layer, group, compression=reef.Compression("one_bit_adam", warmup_steps=1, beta1=0.8))
    for other in (reef.optim.AdamW, reef.optim.SGD, reef.optim.LAMB):
        with pytest.raises(ValueError, match="make an optim::OneBitAdam of its parameters"):
            other(sharded.parameters())
    with pytest.raises(ValueError, match="beta1 of 0.9.* one of 0.8.*give both the same"):
        reef.optim.OneBitAdam(sharded.parameters())
    with pytest.raises(ValueError, match="clip_grad_norm_: gradients are exchanged by compression one_bit_adam"):
        reef.clip_grad_norm_(sharded.parameters(), 1.0)
    before = layer.weight.detach().clone()

    def backward():
        layer.zero_grad()
        layer(torch.ones(4, 30)).square().mean().backward()

    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.0)
    backward()
    optimizer.step()
    with pytest.raises(ValueError, match="have no optimizer: make an optim::OneBitAdam"):
        backward()
    optimizer = reef.optim.OneBitAdam(sharded.parameters(), betas=(0.8, 0.999))
    backward()
    with pytest.raises(ValueError, match="no second moment of any parameter"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
    sharded.end()

    sharded = reef.shard(layer, group, compression=reef.Compression("one_bit_adam", warmup_steps=1, beta1=0.8))
    optimizer = reef.optim.OneBitAdam(sharded.parameters(), betas=(0.8, 0.999))
    for _ in range(2):  # of both phases
        backward()
        before = layer.weight.detach().clone()
        for scaled in ("grad_scale", "found_inf"):
            setattr(optimizer, scaled, torch.tensor(2.0))
            with pytest.raises(ValueError, match="step without a GradScaler"):
                optimizer.step()
            delattr(optimizer, scaled)
        assert torch.equal(layer.weight, before)
        optimizer.step()
        assert not torch.equal(layer.weight, before)
    optimizer.param_groups[0]["betas"] = (0.7, 0.999)
    with pytest.raises(ValueError, match="give both the same"):
        optimizer.step()
    sharded.end()
    with pytest.raises(ValueError, match="is of no shard"):
        optimizer.step()
    reef.optim.AdamW(layer.parameters())  # as ever
