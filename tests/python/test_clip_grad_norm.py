"""Clipping by the norm of gradients, whole or in parts; among ranks: tests/distributed/shard_ranks.py."""

import math
import struct
from fractions import Fraction

import pytest
import torch

import reef
from reef import Part, set_part


def with_gradients(sizes, dtype=torch.float32, seed=0, gain=1.0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        p = torch.zeros(size, dtype=dtype, requires_grad=True)
        p.grad = (torch.randn(p.shape, generator=generator) * gain).to(dtype)
        made.append(p)
    return made


def exact_norm(parameters) -> float:
    total = Fraction(0)
    for p in parameters:
        for x in p.grad.flatten().tolist():
            total += Fraction(x) ** 2
    scaled = math.isqrt(int(total * 2**200))
    return float(Fraction(scaled, 2**100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_it_is_the_norm_and_clips_as_torch_does(dtype):
    sizes = [(3, 5), (1000,), (), (0,), (257, 3), (256,)]
    ours, theirs = with_gradients(sizes, dtype), with_gradients(sizes, dtype)
    expected = exact_norm(ours)
    assert reef.clip_grad_norm_(ours, 1.5) == pytest.approx(expected, rel=1e-14)
    torch.nn.utils.clip_grad_norm_(theirs, 1.5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert reef.clip_grad_norm_(ours, 1e9) == pytest.approx(1.5, rel=2e-2 if dtype.itemsize == 2 else 1e-5)


def test_what_is_smaller_is_left_alone():
    parameters = with_gradients([(10, 10), (7,)], gain=1e-3)
    parameters.append(torch.ones(3, requires_grad=True))  # without a gradient
    before = [p.grad.clone() for p in parameters[:2]]
    reef.clip_grad_norm_(iter(parameters), 1.0)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=False))
    assert reef.clip_grad_norm_(parameters[0], 0.0) > 0 and parameters[0].grad.abs().sum() == 0
    assert reef.clip_grad_norm_([], 1.0) == 0


def test_threads_and_parts_do_not_change_a_bit():
    elements = 300_000
    cuts = [0, 256, 512 * 256, elements]
    for gain in (1e-12, 1.0, 1e12):
        (whole,) = with_gradients([(elements,)], gain=gain)
        norms = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norms.add(struct.pack("d", reef.clip_grad_norm_(whole, math.inf)))
        parts = []
        for first, last in zip(cuts, cuts[1:], strict=False):
            part = torch.zeros(last - first, requires_grad=True)
            set_part(part, Part(first, elements))
            part.grad = whole.grad[first:last].clone()
            parts.insert(0, part)
        norms.add(struct.pack("d", reef.clip_grad_norm_(parts, math.inf)))
        assert len(norms) == 1
        reef.clip_grad_norm_(parts, 0.3)
        reef.clip_grad_norm_(whole, 0.3)
        assert torch.equal(torch.cat([p.grad for p in reversed(parts)]), whole.grad)
    torch.set_num_threads(2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_for_the_optimizer_to_report(bad):
    parameters = with_gradients([(300,), (4,)])
    parameters[1].grad[2] = bad
    before = parameters[0].grad.clone()
    assert reef.clip_grad_norm_(parameters, 0.1) == math.inf
    assert torch.equal(parameters[0].grad, before)


def test_a_gradient_in_another_layout_is_read_as_its_parameter_lies():
    p = torch.zeros(8, 300).t().requires_grad_()
    p.grad = torch.randn(300, 8)
    q = torch.zeros(300, 8, requires_grad=True)
    q.grad = p.grad.clone()
    assert reef.clip_grad_norm_(p, 1.0) == pytest.approx(reef.clip_grad_norm_(q, 1.0), rel=1e-14)
    torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="max_norm is -1"):
        reef.clip_grad_norm_([], -1)
    table = torch.nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="a gradient is sparse"):
        reef.clip_grad_norm_(table.parameters(), 1.0)
    z = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    z.grad = torch.zeros_like(z)
    with pytest.raises(ValueError, match="dtype ComplexFloat has no norm here"):
        reef.clip_grad_norm_(z, 1.0)


def test_opcheck():
    torch.library.opcheck(torch.ops.reef.sum_of_squares, (torch.randn(700),))
