"""Recomputation on a CUDA device: gradients are the plain run's, bit for bit, by any schedule, with and without a tier."""

import functools

import pytest
import torch
from played_device import PLAYED

import reef

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


WIDTH, ROWS = (128, 512) if PLAYED else (256, 1024)


def blocks(count=6, width=WIDTH):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = (torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width),
                                             torch.nn.Linear(4 * width, width))  # fmt: skip
            self.drop = torch.nn.Dropout(0.2)

        def forward(self, x):
            return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(count))).cuda(), torch.randn(ROWS, width, device="cuda", requires_grad=True)


@functools.cache
def weights(x):
    return torch.randn(x.shape, device=x.device, generator=torch.Generator(x.device).manual_seed(2))


def gradients(net, x, call):
    net.zero_grad()
    x.grad = None
    torch.manual_seed(7)
    (call(x) * weights(x)).sum().backward()  # this loss needs nothing but the gradient of the output, so plans count it
    return [x.grad.clone(), *(p.grad.clone() for p in net.parameters()), torch.rand(3, device="cuda"), torch.rand(3)]


def expect_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def test_a_checkpointed_call_is_the_plain_one():
    net, x = blocks()
    expected = gradients(net, x, net)

    def call(x):
        for block in net:
            x = reef.checkpoint(block, x)
        return x

    expect_same(gradients(net, x, call), expected)


def peak_of(net, x, call):
    gradients(net, x, call)
    net.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(net, x, call)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("tier", [None, reef.host_tier, lambda: reef.pinned_tier(1 << 30)], ids=["none", "host", "pinned"])
@pytest.mark.parametrize("part", [0.7, 0.5])
def test_a_planned_chain_needs_what_it_was_given(part, tier):
    net, x = blocks()
    expected = gradients(net, x, net)
    bytes_allowed = int(peak_of(net, x, net) * part)
    planned = reef.PlannedChain(net, tier=tier and tier())
    expect_same(gradients(net, x, lambda x: planned(x, bytes_allowed)), expected)
    assert peak_of(net, x, lambda x: planned(x, bytes_allowed)) <= bytes_allowed


def test_a_chain_with_a_tier_inside_a_budget():
    net, x = blocks()
    expected = gradients(net, x, net)
    planned = reef.PlannedChain(net, tier=reef.pinned_tier(1 << 30))
    bytes_allowed = peak_of(net, x, net) // 2
    with reef.budget(torch.cuda.memory_allocated() + 2 * bytes_allowed, net, device="cuda"):
        expect_same(gradients(net, x, lambda x: planned(x, bytes_allowed)), expected)
        expect_same(gradients(net, x, lambda x: planned(x, bytes_allowed)), expected)


def test_a_profile_counts_the_devices_bytes():
    net, x = blocks(2)
    profile = reef.Chain(net).profile(x, repeats=1)
    assert [stage.output_bytes for stage in profile.stages] == [x.nbytes] * 2
    assert all(stage.forward_seconds > 0 and stage.tape_bytes >= 4 * x.nbytes for stage in profile.stages)
