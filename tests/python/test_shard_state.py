"""State dicts of reef.shard, written by some ranks and loaded by another number of them (tests/distributed/
shard_state_ranks.py is each rank)."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import reef

RANKS = Path(__file__).resolve().parents[1] / "distributed"
PROGRAM, KINDS, WRONG = (str(RANKS / f"shard_{which}_ranks.py") for which in ("state", "kinds", "wrong"))


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(3, 2), (1, 3)])
def test_another_number_of_ranks_goes_on_bit_for_bit(saved_by, loaded_by, tmp_path):
    for ranks, arguments in ((saved_by, ["save", str(tmp_path)]), (loaded_by, ["load", str(tmp_path), str(saved_by)])):
        result = run_ranks([PROGRAM, *arguments], ranks)
        assert result.ok, result.report()
        assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


def test_what_does_not_fit_is_refused():
    layer = torch.nn.Linear(30, 20)
    sharded = reef.shard(layer, reef.init_process_group(rank=0, world_size=1), stage=1)
    whole = sharded.full_state_dict()
    for change, text in [
        (lambda d: d.pop("weight"), r"weight\[0:600\] is missing in the state that is loaded"),
        (lambda d: d.update(other=torch.ones(1)), "the state that is loaded has other, which the module has not"),
        (lambda d: d.update(bias=torch.ones(3)), r"bias has the shape \[3\] in the state that is loaded and \[20\] here"),
    ]:
        bad = dict(whole)
        change(bad)
        with pytest.raises(ValueError, match=text):
            sharded.load_state_dict(bad)
    with pytest.raises(ValueError, match="rank 0 was given no state to load"):
        sharded.load_state_dict()

    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    kept = sharded.full_optimizer_state_dict(optimizer)
    with pytest.raises(ValueError, match="1 parameter groups, and 2 in the state that is loaded"):
        sharded.load_optimizer_state_dict(optimizer, {**kept, "param_groups": kept["param_groups"] * 2})
    two = torch.optim.SGD([{"params": p} for p in sharded.parameters()], lr=0.1)
    swapped = sharded.full_optimizer_state_dict(two)
    swapped["param_groups"].reverse()
    with pytest.raises(ValueError, match=r"weight\[0:600\] is not in group 0 of the state that is loaded"):
        sharded.load_optimizer_state_dict(two, swapped)
    with pytest.raises(ValueError, match=r"none of the shard's parameters\(\)"):
        sharded.full_optimizer_state_dict(torch.optim.SGD(layer.parameters(), lr=0.1))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_kind_of_parameter_is_saved_and_grouped_as_in_one_process(ranks, tmp_path):
    result = run_ranks([KINDS, str(tmp_path)], ranks)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_wrong_on_one_rank_is_heard_of_on_all(ranks):
    result = run_ranks([WRONG], ranks)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


class Rows(torch.optim.Optimizer):
    """Keeps something of each row, and says so by nothing but that."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = rows = p.grad.sum(-1, keepdim=True)
                p.sub_(rows * group["lr"])


class OfOurOwn(torch.optim.LBFGS):
    """Has another name than what it is."""


@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_that_is_not_by_element_is_refused_parts(stage):
    layer = torch.nn.Linear(30, 20)
    sharded = reef.shard(layer, reef.init_process_group(rank=0, world_size=1), stage=stage)
    optimizer = Rows(sharded.parameters(), lr=0.1)
    layer(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    if stage == 0:
        optimizer.step()
        sharded.full_optimizer_state_dict(optimizer)
    else:
        for call in (optimizer.step, lambda: sharded.full_optimizer_state_dict(optimizer)):
            with pytest.raises(ValueError, match=r"needs whole ones \(it keeps rows of shape \(1, 1\)\)"):
                call()
        with pytest.raises(ValueError, match=r"needs whole ones \(it is LBFGS\)"):
            OfOurOwn(sharded.parameters()).step(lambda: layer(torch.ones(2, 30)).sum())
    sharded.end()


def test_what_takes_the_place_of_an_optimizer_is_put_back_with_it():
    layer = torch.nn.Linear(30, 20)
    sharded = reef.shard(layer, reef.init_process_group(rank=0, world_size=1), stage=2, offload=True)
    adamw = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    optimizer = reef.DelayedUpdate(adamw, sharded)
    kept = sharded.full_optimizer_state_dict(optimizer)
    kept["param_groups"][0]["lr"] = 0.7

    def refuse(state):
        type(adamw).load_state_dict(adamw, state)
        raise RuntimeError("not today")

    adamw.load_state_dict = refuse
    with pytest.raises(RuntimeError, match="not today"):
        sharded.load_optimizer_state_dict(optimizer, kept)
    assert adamw.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1
    del adamw.load_state_dict
    sharded.load_optimizer_state_dict(optimizer, kept)
    assert adamw.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.7
    optimizer.close()
    sharded.end()


@pytest.mark.parametrize("stage", range(4))
def test_a_frozen_parameter_that_the_program_writes_is_what_was_written(stage):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 2))
    net[0].requires_grad_(False)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    group = reef.init_process_group(rank=0, world_size=1)
    sharded = reef.shard(net, group, stage=stage, mixed_precision=torch.bfloat16)
    assert all(torch.equal(value, before[key]) for key, value in sharded.full_state_dict().items())
    with torch.no_grad():
        net[0].weight[0].fill_(1.5)
    written = before["0.weight"].clone()
    written[0] = 1.5  # and the rest of it has the bits that rounding took
    assert torch.equal(sharded.full_state_dict()["0.weight"], written)
    kept = {key.split("[")[0]: value for key, value in sharded.sharded_state_dict().items()}
    assert torch.equal(kept["0.weight"].reshape(20, 30), written) and kept["0.weight"].dtype == torch.float32
    sharded.load_state_dict(before)
    assert torch.equal(net[0].weight, before["0.weight"].bfloat16())
    assert torch.equal(sharded.full_state_dict()["0.weight"], before["0.weight"])
    net[0].weight.data = net[0].weight.data.float() + 1  # no longer of 16 bits
    assert torch.equal(sharded.full_state_dict()["0.weight"], before["0.weight"].bfloat16().float() + 1)
    sharded.end()


class Belief(torch.optim.Optimizer):
    """With Adam's options, and a state of its own."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"exp_avg": p.grad.clone(), "exp_avg_var": p.grad.square()}


@pytest.mark.parametrize("stage", range(4))
def test_what_a_rule_keeps_is_known_of_known_rules_alone(stage):
    layer = torch.nn.Linear(30, 20)
    sharded = reef.shard(layer, reef.init_process_group(rank=0, world_size=1), stage=stage)
    belief, adamw = Belief(sharded.parameters(), lr=0.1), reef.optim.AdamW(sharded.parameters(), lr=0.1)
    layer(torch.ones(2, 30)).sum().backward()
    belief.step()
    adamw.step()
    kept = sharded.full_optimizer_state_dict(belief)
    sharded.load_optimizer_state_dict(belief, kept)
    assert all(torch.equal(belief.state[p]["exp_avg_var"], p.grad.square()) for p in sharded.parameters())
    moments = [adamw.state[p]["exp_avg"].clone() for p in sharded.parameters()]
    with pytest.raises(ValueError, match="of weight.* has no exp_avg_sq, which the optimizer's rule keeps"):
        sharded.load_optimizer_state_dict(adamw, kept)
    assert all(torch.equal(adamw.state[p]["exp_avg"], m) for p, m in zip(sharded.parameters(), moments, strict=True))
    sharded.end()
