"""Stepping each parameter in backward."""

import pytest
import torch
from optim_rules import MAKE, every_rule, same

import reef
from reef import optim


class Net(torch.nn.Module):
    """One layer is used twice, one seldom, one is frozen, two share their weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seldom, self.frozen, self.tied = (torch.nn.Linear(24, 24) for _ in range(5))
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, seldom):
        y = self.first(x)
        if seldom:
            y = y + self.seldom(x)
        return self.tied(self.second(torch.tanh(self.frozen(self.second(y)))))


def loss_of(net, number):
    return net(torch.full((8, 24), 0.1 * (number + 1)), number % 4 == 1).pow(2).mean()


@every_rule
@pytest.mark.parametrize("state", ["float32", "int8"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_takes_the_same_steps(rule, state, accumulate):
    def train(released):
        torch.manual_seed(0)
        net = Net()
        params = list(net.parameters())
        optimizer = MAKE[rule]([{"params": params[:3]}, {"params": params[3:]}], state=state, min_quantized_numel=100)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        release = optim.GradientRelease(optimizer, accumulate) if released else None
        for step in range(4):
            for number in range(accumulate):
                loss_of(net, step * accumulate + number).backward()
            optimizer.step()
            if released:
                assert all(p.grad is None for p in params)
            schedule.step()
            optimizer.zero_grad()
        if release is not None:
            release.remove()
        return params

    assert same(train(False), train(True))


def test_few_gradients_are_there_at_a_time():
    layer_bytes = 64 * 65 * 4

    def peak(released):
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(10)])
        optimizer = optim.AdamW(net.parameters())
        release = optim.GradientRelease(optimizer) if released else None
        ledger = reef.Ledger()
        ledger.watch(net)
        for _ in range(3):
            net(torch.ones(4, 64)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = ledger.peak_by_category()["gradient"]
        if release is not None:
            release.remove()
        return found

    assert peak(False) == 10 * layer_bytes
    assert peak(True) <= layer_bytes


def test_a_pass_too_many_is_refused_and_the_next_step_takes_it():
    net = Net()
    optimizer = optim.AdamW(net.parameters())
    with optim.GradientRelease(optimizer):
        loss_of(net, 0).backward()
        with pytest.raises(RuntimeError, match="has been stepped after 1 backward passes, and here is another"):
            loss_of(net, 0).backward()
        optimizer.step()
        assert all(p.grad is None for p in net.parameters())
        loss_of(net, 0).backward()
        assert all(p.grad is None for p in net.parameters())
    loss_of(net, 0).backward()
    assert net.first.weight.grad is not None


def test_step_reports_what_was_not_finite():
    net = Net()
    optimizer = optim.AdamW(net.named_parameters())
    with optim.GradientRelease(optimizer):
        before = net.second.bias.detach().clone()
        (loss_of(net, 0) * float("inf")).backward()
        with pytest.raises(optim.NonFiniteGradient, match=r"second\.bias"):
            optimizer.step()
        assert torch.equal(net.second.bias, before)
        loss_of(net, 0).backward()
        optimizer.step()


def test_what_cannot_be_is_refused():
    net = Net()
    optimizer = optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match="accumulate is 0"):
        optim.GradientRelease(optimizer, accumulate=0)
    with pytest.raises(TypeError, match=r"SGD is no optimizer of reef\.optim"):
        optim.GradientRelease(torch.optim.SGD(net.parameters()))
    with optim.GradientRelease(optimizer):
        with pytest.raises(ValueError, match="being released already"):
            optim.GradientRelease(optimizer)
        # Gradients were scaled when they were stepped: it is said as soon as it can be known.
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(net, 0)).backward()
        with pytest.raises(RuntimeError, match="GradScaler"):
            scaler.step(optimizer)
