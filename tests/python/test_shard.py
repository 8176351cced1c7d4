"""reef.shard among real processes (tests/distributed/shard_ranks.py is each rank), and what it refuses."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from ranks import beside_each_other, run_ranks

import reef

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "shard_ranks.py")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_stage_is_one_process_that_accumulates(ranks):
    result = run_ranks([PROGRAM], ranks)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


GONE = [("ends", "before backward", "optimizer"), ("ends", "after the step", "parameters"),
        ("stops", "before backward", "parameters"), ("stops", "after the step", "optimizer")]  # way, phase, stage


@pytest.fixture(scope="module")
def with_a_rank_that_is_gone():
    return beside_each_other(lambda row: run_ranks([PROGRAM, *row], 3), GONE)


@pytest.mark.parametrize(("way", "phase", "stage"), GONE)
def test_a_rank_that_is_gone_is_named(with_a_rank_that_is_gone, way, phase, stage):
    result = with_a_rank_that_is_gone[way, phase, stage]
    for rank in (0, 2):
        (told,) = [line for line in result.ranks[rank].output.splitlines() if line.startswith("told: ")]
        assert f"rank {rank} of 3: the " in told and "failed: rank 1 (process " in told, told
        assert f" in step {3 if phase == 'after the step' else 2} failed" in told, told
        assert ("it is stopped" if way == "stops" else "is gone") in told, told
        assert result.ranks[rank].ok, result.report()
    if way == "stops":  # when it goes on, the others are gone
        assert "is gone" in result.ranks[1].output, result.report()


def test_bad_options_are_refused():
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="no process group"):
        reef.shard(layer)
    group = reef.init_process_group(rank=0, world_size=1)
    with pytest.raises(ValueError, match="stage is 7; give 0 to 3"):
        reef.shard(layer, group, stage=7)
    with pytest.raises(ValueError, match="stage 'full' is not"):
        reef.shard(layer, group, stage="full")
    with pytest.raises(ValueError, match="bucket_bytes 0"):
        reef.shard(layer, group, bucket_bytes=0)
    with pytest.raises(ValueError, match="resident_bytes -1"):
        reef.shard(layer, group, stage=3, resident_bytes=-1)
    with pytest.raises(ValueError, match="reduction 'max' is not"):
        reef.shard(layer, group, reduction="max")
    with pytest.raises(ValueError, match="sum_order 'ring' is not"):
        reef.shard(layer, group, sum_order="ring")
    with pytest.raises(ValueError, match="buffers 'max' is not"):
        reef.shard(layer, group, buffers="max")
    with pytest.raises(ValueError, match="MixedPrecision with parameters of Double: give BFloat16 or Half"):
        reef.shard(layer, group, mixed_precision=torch.float64)
    with pytest.raises(ValueError, match="MixedPrecision with sums of Half: give Float, or what the parameters are, BFloat16"):
        reef.shard(layer, group, mixed_precision=reef.MixedPrecision(sums=torch.float16))
    with pytest.raises(ValueError, match="number 1 of the ignored tensors, which is no parameter"):
        reef.shard(layer, group, ignored=[layer.bias, torch.zeros(4)])


def test_a_delayed_update_says_what_it_cannot_do():
    group = reef.init_process_group(rank=0, world_size=1)
    layer = torch.nn.Linear(4, 4)

    def delayed(**options):
        sharded = reef.shard(torch.nn.Linear(4, 4), group, **options)
        return reef.DelayedUpdate(torch.optim.SGD(sharded.parameters(), lr=0.1), sharded), sharded

    with pytest.raises(ValueError, match="not copies beside whole parameters"):
        delayed(stage="gradients")
    with pytest.raises(ValueError, match="not copies beside whole parameters"):
        delayed(stage="parameters", offload=True)
    optimizer, sharded = delayed(offload=True)
    with pytest.raises(ValueError, match="a shard that has one"):
        reef.DelayedUpdate(torch.optim.SGD(sharded.parameters(), lr=0.1), sharded)
    with pytest.raises(ValueError, match="cannot call a closure"):
        optimizer.step(lambda: 0.0)
    optimizer.close()

    # What a step raises, the next one does; the gradients are there then.
    sharded = reef.shard(layer, group, offload=True)
    optimizer = reef.DelayedUpdate(reef.optim.AdamW(sharded.parameters()), sharded)
    layer(torch.full((1, 4), float("nan"))).sum().backward()
    optimizer.step()
    layer(torch.ones(1, 4)).sum().backward()
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.finish()
    optimizer.load_state_dict(saved)
    assert all(p.isfinite().all() for p in layer.parameters())


def test_buffers_and_ignored_parameters():
    group = reef.init_process_group(rank=0, world_size=1)
    for how in ("local", "broadcast", "mean"):
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 4))
        sharded = reef.shard(net, group, stage=1, buffers=how, ignored=net[1].parameters())
        assert [name.partition("[")[0] for name in sharded.names()] == ["0.weight", "0.bias"]
        net(torch.randn(8, 300)).square().mean().backward()
        assert net[0].num_batches_tracked == 1 and net[1].weight.grad is not None
        assert sharded.full_state_dict().keys() == net.state_dict().keys()


def test_a_gradient_that_was_taken_before_is_not_passed_over():
    layer = torch.nn.Linear(64, 64)
    sharded = reef.shard(layer, reef.init_process_group(rank=0, world_size=1))
    optimizer = reef.optim.AdamW(sharded.parameters())
    release = reef.optim.GradientRelease(optimizer)
    with pytest.raises(ValueError, match="the gradient of parameter (weight|bias) was taken before it could be reduced"):
        layer(torch.ones(2, 64)).sum().backward()
    release.remove()


def test_a_shard_lives_as_long_as_its_module_unless_it_is_ended():
    layer = torch.nn.Linear(300, 4)
    group = reef.init_process_group(rank=0, world_size=1)
    for stage in range(4):
        parts = reef.shard(layer, group, stage=stage).parameters()
        gc.collect()
        layer(torch.ones(2, 300)).sum().backward()
        assert all(p.grad is not None for p in parts)
        with pytest.raises(ValueError, match="another Shard has already"):
            reef.shard(layer, group, stage=stage)
        reef.shard_of(layer).end()
        assert reef.shard_of(layer) is None
        layer.zero_grad()
        layer(torch.ones(2, 300)).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


class Heard:
    """Stands before a shard and notes what it is asked."""

    def __init__(self, native):
        self.shard, self.asked = native.shard, []
        native.shard = self

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.shard, name)


def replaced(optimizer, part):
    optimizer.param_groups[0]["params"][0] = part


# How an optimizer of other tensors comes to parts, and of which of two shards.
WAYS = {
    "none": ((), lambda optimizer, parts: None),
    "one": ((0,), lambda optimizer, parts: replaced(optimizer, parts[0][0])),
    "the other": ((1,), lambda optimizer, parts: replaced(optimizer, parts[1][-1])),
    "a group of both": ((0, 1), lambda optimizer, parts: optimizer.add_param_group({"params": parts[0] + parts[1]})),
    "a group each": ((0, 1), lambda optimizer, parts: [optimizer.add_param_group({"params": of}) for of in parts]),
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_a_step_asks_the_shards_whose_parts_it_steps_and_no_other(way, stage):
    group = reef.init_process_group(rank=0, world_size=1)
    layers = [torch.nn.Linear(300, 4) for _ in range(2)]
    shards = [reef.shard(layer, group, stage=stage) for layer in layers]
    shards[0].refresh()  # whose parts are others then
    parts = [sharded.parameters() for sharded in shards]
    optimizer = torch.optim.SGD([torch.ones(2), torch.ones(3)], lr=0.1)
    stepped, comes_to = WAYS[way]
    comes_to(optimizer, parts)
    for layer in layers:
        layer(torch.ones(2, 300)).sum().backward()
        layer.zero_grad()
    heard = [Heard(sharded._native) for sharded in shards]
    optimizer.step()
    assert [each.asked for each in heard] == [["clear_gradients"] if n in stepped else [] for n in range(2)]
    for n in stepped:
        assert all(p.grad is None for p in parts[n])

    # One that has ended is not asked any more, and one that is gone neither.
    shards[0]._native.shard = heard[0].shard
    shards[0].end()
    heard[0].asked.clear()
    heard[1].asked.clear()
    optimizer.step()
    assert (heard[0].asked, heard[1].asked) == ([], ["clear_gradients"] if 1 in stepped else [])
    gone = weakref.ref(shards.pop()._native)
    del layers, heard, layer
    gc.collect()
    optimizer.step()
    assert gone() is None


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_an_optimizer_that_needs_whole_parameters_is_refused_parts(make, stage):
    layer = torch.nn.Linear(300, 4)
    sharded = reef.shard(layer, reef.init_process_group(rank=0, world_size=1), stage=stage)
    optimizer = make(sharded.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.ones(2, 300)).pow(2).sum()
        loss.backward()
        return loss

    closure()
    if stage == 0:
        optimizer.step(closure)
    else:
        with pytest.raises(ValueError, match=f"{make.__name__} was given parts of parameters"):
            optimizer.step(closure)
    sharded.end()


def test_a_module_that_is_gone_takes_its_shard_with_it():
    group = reef.init_process_group(rank=0, world_size=1)
    layer = torch.nn.Linear(300, 4)
    weight = layer.weight
    sharded = reef.shard(layer, group, stage=1)
    gone = weakref.ref(layer)
    del layer, sharded
    gc.collect()
    assert gone() is None
    other = torch.nn.Linear(300, 4)
    other.weight = weight
    reef.shard(other, group, stage=1).end()
