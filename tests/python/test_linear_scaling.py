"""The linear scaling rule: rates, and what momentum has to do with them."""

import io

import pytest
import torch

import reef


def make(lr=0.1, **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(30, dtype=torch.float64).float())
    return p, torch.optim.SGD([{"params": [p], "lr": lr}], lr=lr, **options)


def gradient(step):
    return torch.randn(30, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", [torch.optim.SGD, reef.optim.LARS, reef.optim.AdamW])
def test_rates_rise_in_equal_steps_to_the_factor(kind):
    first, second = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    optimizer = kind([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.4}], lr=1.0)
    scheduler = reef.LinearScaling(optimizer, 8, warmup_steps=7)
    for step in range(12):
        scale = 1 + min(step, 7)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * scale, 0.4 * scale], rel=1e-12)
        for p in (first, second):
            p.grad = torch.ones_like(p)
        optimizer.step()
        before = optimizer.param_groups[0]["lr"]
        scheduler.step()
        assert scheduler.momentum_factor == pytest.approx(optimizer.param_groups[0]["lr"] / before, rel=1e-12)
    assert scheduler.momentum_factor == 1


def test_without_a_warmup_it_is_there_at_once():
    _, optimizer = make()
    reef.LinearScaling(optimizer, 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)


def test_other_schedulers_count_too():
    p, optimizer = make()
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 8], gamma=0.1)
    both = torch.optim.lr_scheduler.ChainedScheduler([reef.LinearScaling(optimizer, 5, 4), decay])
    rates = []
    for step in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        p.grad = gradient(step)
        optimizer.step()
        both.step()
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005])


# 1706.02677, section 3: momentum that has the rate in it makes the same steps if it is corrected, and only then.
@pytest.mark.parametrize("corrected", [True, False])
def test_momentum_that_has_the_rate_in_it_is_corrected(corrected):
    p, optimizer = make(momentum=0.9)
    scheduler = reef.LinearScaling(optimizer, 16, warmup_steps=5)
    q, v = p.detach().double(), torch.zeros(30, dtype=torch.float64)
    for step in range(8):
        p.grad = gradient(step)
        factor = scheduler.momentum_factor if corrected else 1
        v = 0.9 * factor * v + optimizer.param_groups[0]["lr"] * p.grad.double()
        q -= v
        optimizer.step()
        scheduler.step()
    assert torch.allclose(p.detach().double(), q, rtol=1e-5, atol=1e-5) == corrected


def test_a_run_goes_on_where_it_was():
    def train(p, optimizer, scheduler, steps):
        for step in steps:
            p.grad = gradient(step)
            optimizer.step()
            scheduler.step()

    p, optimizer = make(momentum=0.9)
    scheduler = reef.LinearScaling(optimizer, 8, 6)
    train(p, optimizer, scheduler, range(3))
    file = io.BytesIO()
    torch.save([p.detach(), optimizer.state_dict(), scheduler.state_dict()], file)
    train(p, optimizer, scheduler, range(3, 9))
    file.seek(0)
    values, of_optimizer, of_scheduler = torch.load(file)
    q, other = make(momentum=0.9)
    q.data.copy_(values)
    rates = reef.LinearScaling(other, 2, 3)
    other.load_state_dict(of_optimizer)
    rates.load_state_dict(of_scheduler)
    train(q, other, rates, range(3, 9))
    assert torch.equal(p, q) and other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("given", [(0.5, 3), (float("inf"), 3), (float("nan"), 3), (2, -1)])
def test_refusals(given):
    _, optimizer = make()
    with pytest.raises(ValueError, match="LinearScaling was given"):
        reef.LinearScaling(optimizer, *given)
    assert optimizer.param_groups[0]["lr"] == 0.1
