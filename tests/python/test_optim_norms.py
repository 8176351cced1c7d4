"""LAMB and LARS: norms of parts over ranks (tests/distributed/optim_norms_ranks.py is each rank), and what a ratio of norms
does not depend on."""

from pathlib import Path

import pytest
import torch
from ranks import beside_each_other, run_ranks

import reef
from reef import optim

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "optim_norms_ranks.py")


@pytest.fixture(scope="module")
def runs():
    return beside_each_other(lambda ranks: run_ranks([PROGRAM], ranks), [1, 2, 3, 4])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_stage_and_number_of_ranks_steps_as_one_process(runs, ranks):
    result = runs[ranks]
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


# A step of parts that have one memory for their whole: each asks for its norm by the sum of all.
@pytest.mark.parametrize("elements", [[256, 1000 - 256], [512, 256, 1000 - 768], [1000]])
@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_squares_of_parts_are_those_of_the_whole(rule, elements):
    generator = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(10, 100, generator=generator) * 10.0 ** (3 * i - 3) for i in range(4))
    numbers = [0.1, 0.9, 0.99, 1e-6, 0.01, *[0.0] * 8]

    def squares(first, last):
        states = [m, v.square()] if rule == "lamb" else [m]
        of = [t.reshape(-1)[first:last] for t in (p, g, *states)]
        none = torch.empty(0)
        states = [t for state in of[2:] for t in (state, none)]
        return torch.ops.reef.optim_squares(
            rule, "float32", "none", of[:1], of[1:2], states, [], [torch.tensor(3.0)], numbers
        )[0]  # fmt: skip

    ends = [sum(elements[: i + 1]) for i in range(len(elements))]
    parts = [squares(end - count, end) for count, end in zip(elements, ends, strict=True)]
    carried = sum(parts)
    carry = torch.zeros(2, dtype=torch.int64)
    for i in range(carried.shape[1] - 1):  # digits of 32 bits
        carried[:, i] += carry
        carry = carried[:, i] >> 32
        carried[:, i] &= 0xFFFFFFFF
    assert torch.equal(carried, squares(0, 1000))


# 1708.03888 and 1904.00962: a layer's step relative to its weights has no unit.
@pytest.mark.parametrize("scale", [2.0**-10, 2.0**7])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.LARS(p, lr=1.0, weight_decay=0.01, trust_coefficient=0.02, eps=0.0),
        lambda p: optim.LAMB(p, lr=0.01, eps=0.0),
    ],
)
def test_scaling_weights_and_gradients_scales_the_step(make, scale):
    def stepped(factor):
        generator = torch.Generator().manual_seed(5)
        p = torch.nn.Parameter(torch.randn(40, 30, generator=generator) * factor)
        optimizer = make([p])
        for _ in range(3):
            p.grad = torch.randn(40, 30, generator=generator) * factor
            optimizer.step()
        return p.detach()

    assert torch.equal(stepped(1.0) * scale, stepped(scale))  # by a power of two, no rounding differs


# Of LAMB the gradient's scale alone does not matter, either; of LARS the gradient's, without decay.
@pytest.mark.parametrize(
    "make",
    [lambda p: optim.LARS(p, lr=1.0, trust_coefficient=0.02, eps=0.0), lambda p: optim.LAMB(p, lr=0.01, eps=0.0)],
)
def test_scaling_gradients_alone_changes_nothing(make):
    def stepped(factor):
        generator = torch.Generator().manual_seed(5)
        p = torch.nn.Parameter(torch.randn(40, 30, generator=generator))
        optimizer = make([p])
        for _ in range(3):
            p.grad = torch.randn(40, 30, generator=generator) * factor
            optimizer.step()
        return p.detach()

    assert torch.allclose(stepped(1.0), stepped(2.0**9), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", ["LAMB", "LARS"])
def test_tensors_of_one_dimension_are_not_scaled(rule):
    def stepped(shape):
        torch.manual_seed(2)
        p = torch.nn.Parameter(torch.randn(600).view(shape))
        optimizer = getattr(optim, rule)([p], lr=0.1)
        p.grad = torch.randn(600).view(shape)
        optimizer.step()
        return p.detach().view(-1)

    torch.manual_seed(2)
    w, g = torch.randn(600), torch.randn(600)
    plain = w - 0.1 * (g / (g.abs() + 1e-6) if rule == "LAMB" else g)
    assert torch.allclose(stepped((600,)), plain, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(stepped((20, 30)), plain, rtol=1e-3, atol=1e-4)


def test_refusals():
    p = torch.nn.Parameter(torch.randn(256))
    reef.set_part(p, reef.Part(0, 1024), (32, 32))
    p.grad = torch.randn(256)
    optimizer = optim.LAMB([p])
    before = p.detach().clone()
    with pytest.raises(ValueError, match="give the optimizer the group"):
        optimizer.step()
    assert torch.equal(p, before) and not optimizer.state
    group = reef.init_process_group()
    optimizer = optim.LAMB([p], group=group)
    with optim.GradientRelease(optimizer), pytest.raises(ValueError, match="without GradientRelease"):
        (p * 2).sum().backward()
    assert torch.equal(p, before)
    with pytest.raises(TypeError, match="group"):
        optim.AdamW([p], group=group)
