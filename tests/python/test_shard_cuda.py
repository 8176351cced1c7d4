"""reef.shard with CUDA parameters: one rank, whose step is the plain one, bit for bit; and two that share the device
(tests/distributed/shard_cuda_ranks.py is each of these)."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import reef

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 4
STAGES = ["replicate", "optimizer", "gradients", "parameters"]


@pytest.fixture(scope="module")
def group():
    return reef.init_process_group(rank=0, world_size=1)


def net_and_batches():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(256, 8)).cuda()
    generator = torch.Generator("cuda").manual_seed(1)
    return net, [torch.randn(64, 256, device="cuda", generator=generator) for _ in range(STEPS)]


def train(net, batches, optimizer, before_backward=lambda: None):
    for x in batches:
        optimizer.zero_grad()
        loss = net(x.to(net[0].weight.dtype)).square().mean()
        before_backward()
        loss.backward()
        optimizer.step()
    if isinstance(optimizer, reef.DelayedUpdate):
        optimizer.finish()


def plainly():
    net, batches = net_and_batches()
    train(net, batches, reef.optim.AdamW(net.parameters(), lr=1e-3))
    return {name: tensor.cpu() for name, tensor in net.state_dict().items()}


def sharded(group, before_backward=lambda: None, **options):
    net, batches = net_and_batches()
    shard = reef.shard(net, group, bucket_bytes=300_000, **options)
    train(net, batches, reef.optim.AdamW(shard.parameters(), lr=1e-3), before_backward)
    return {name: tensor.cpu() for name, tensor in shard.full_state_dict().items()}


def expect_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("cycles", [0, 5_000_000])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("sum_order", ["ranks", "native"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_the_plain_step(stage, sum_order, offload, cycles, group):
    late = (lambda: torch.cuda._sleep(cycles)) if cycles else lambda: None
    expect_same(sharded(group, late, stage=stage, sum_order=sum_order, offload=offload), plainly())


@pytest.mark.parametrize("stage", STAGES)
def test_masters(stage, group):
    found = sharded(group, stage=stage, mixed_precision=torch.bfloat16)
    expect_same(sharded(group, stage=stage, mixed_precision=torch.bfloat16, offload=True), found)


@pytest.mark.parametrize("stage", ["replicate", "optimizer"])
def test_a_delayed_update_trains(stage, group):
    net, batches = net_and_batches()
    shard = reef.shard(net, group, bucket_bytes=300_000, stage=stage, offload=True)
    optimizer = reef.DelayedUpdate(reef.optim.AdamW(shard.parameters(), lr=1e-3), shard)
    before = net[0].weight.detach().clone()
    train(net, batches * 2, optimizer)
    assert not torch.equal(before, net[0].weight) and net[0].weight.isfinite().all()
    optimizer.close()


def test_a_pass_that_fails_is_abandoned(group):
    net, batches = net_and_batches()
    shard = reef.shard(net, group, bucket_bytes=300_000, stage="parameters")
    optimizer = reef.optim.AdamW(shard.parameters(), lr=1e-3)
    train(net, batches[:2], optimizer)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no more memory")

    with pytest.raises(RuntimeError, match="no more memory"):
        net[4:](Fails.apply(net[:4](batches[0]))).square().mean().backward()
    optimizer.zero_grad()
    train(net, batches[2:], optimizer)
    expect_same({name: tensor.cpu() for name, tensor in shard.full_state_dict().items()}, plainly())


def test_inside_a_budget(group):
    expected = plainly()
    for stage in STAGES:
        net, batches = net_and_batches()
        shard = reef.shard(net, group, bucket_bytes=300_000, stage=stage)
        optimizer = reef.optim.AdamW(shard.parameters(), lr=1e-3)
        train(net, [], optimizer)
        with reef.budget(torch.cuda.memory_allocated() + (2 << 20), net, device="cuda") as budget:
            train(net, batches, optimizer)
            assert budget.use().evictions > 0
        expect_same({name: tensor.cpu() for name, tensor in shard.full_state_dict().items()}, expected)


def test_states_travel_between_devices(group):
    net, batches = net_and_batches()
    shard = reef.shard(net, group, stage="optimizer")
    optimizer = reef.optim.AdamW(shard.parameters(), lr=1e-3, state="int8", min_quantized_numel=0)
    train(net, batches[:2], optimizer)
    saved, states = shard.full_state_dict(), shard.full_optimizer_state_dict(optimizer)
    train(net, batches[2:], optimizer)
    expected = {name: tensor.cpu() for name, tensor in shard.full_state_dict().items()}

    again, _ = net_and_batches()
    shard = reef.shard(again, group, stage="parameters", bucket_bytes=300_000)
    optimizer = reef.optim.AdamW(shard.parameters(), lr=1e-3, state="int8", min_quantized_numel=0)
    shard.load_state_dict(saved)
    shard.load_optimizer_state_dict(optimizer, states)
    train(again, batches[2:], optimizer)
    expect_same({name: tensor.cpu() for name, tensor in shard.full_state_dict().items()}, expected)


def test_collectives_and_messages_on_a_device(group):
    x = torch.arange(1000, device="cuda", dtype=torch.float32)
    reef.all_reduce([x], group)
    assert torch.equal(x.cpu(), torch.arange(1000, dtype=torch.float32))
    assert reef.global_mean(x.sum(), 1000, group=group).item() == pytest.approx(499.5)


@pytest.mark.parametrize("method", ["topk", "gtopk", "gtopk_tree", "oktopk", "dgc"])
def test_the_largest_elements_are_the_cpus(method):
    program = Path(__file__).resolve().parents[1] / "distributed" / "shard_cuda_ranks.py"
    result = run_ranks([str(program), method, "cuda"], 2)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks), result.report()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("method", ["qsgd", "sign", "powersgd", "powersgd_alternating"])
def test_methods_of_the_cpu_are_refused(method, offload, group):
    where = "cuda:0, and compression {}, which is for gradients on the CPU: take bfloat16, topk or none"
    net, _ = net_and_batches()
    with pytest.raises(ValueError, match="reef::shard was given parameter .*, which is on " + where.format(method)):
        reef.shard(net, group, compression=method, offload=offload)
    shard = reef.shard(net, group, offload=offload)
    of_local_updates = "reef::LocalUpdates was given parameter .*, " + ("whose module" if offload else "which") + " is on "
    with pytest.raises(ValueError, match=of_local_updates + where.format(method)):
        reef.LocalUpdates(shard, local_steps=2, compression=method)
    updates = reef.LocalUpdates(shard, local_steps=2, compression="topk")
    updates.step()
    updates.close()
    shard.end()
