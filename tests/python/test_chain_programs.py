"""Programs made at random: a network that changes between steps with inputs that do, against the plain run. What fails is
found again by its seed."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn

import reef

WIDTH = 48


class Average(nn.Module):
    """Replaces and writes what it reads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("fast", torch.zeros(WIDTH))
        self.register_buffer("slow", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            mean = y.detach().mean((0, 1))
            self.fast.mul_(0.5).add_(mean)
            self.slow = 0.9 * self.slow + 0.1 * mean
        return (y - self.fast).tanh() * (self.slow + 1)


LAYERS = [
    lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)),
    lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True),
    lambda: nn.Dropout(0.2, inplace=True),
    Average,
]


class Program:
    def __init__(self, seed):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(self.layer() for _ in range(5)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
        self.length, self.batch = 30, 3
        self.log = []

    def layer(self):
        return self.random.choice(LAYERS)()

    def place(self):
        return self.random.randrange(1, len(self.net))

    def change(self):
        net = self.net
        changes = {
            "replace": lambda: net.__setitem__(self.place(), self.layer()),
            "append": lambda: net.append(self.layer()),
            "insert": lambda: net.insert(self.place(), self.layer()),
            "take out": lambda: len(net) > 3 and net.__delitem__(self.place()),
            "once more": lambda: net.append(net[self.place()]),
            "freeze": lambda: net[self.place()].requires_grad_(False),
            "unfreeze": lambda: net.requires_grad_(True),
            "freeze one": lambda: self.random.choice(list(net.parameters())).requires_grad_(False),
            "evaluate": lambda: net[self.place()].eval(),
            "train": net.train,
            "step": self.optimizer.step,
            "clear": net.zero_grad,
            "zero": lambda: net.zero_grad(set_to_none=False),
            "longer": lambda: setattr(self, "length", self.random.randrange(24, 60)),
            "another batch": lambda: setattr(self, "batch", self.random.randrange(1, 5)),
        }
        name = self.random.choice(list(changes))
        self.log.append(name)
        changes[name]()

    def run(self, net, call, seed):
        torch.manual_seed(seed)
        x = torch.randn(self.batch, self.length, WIDTH).requires_grad_(self.requires_grad)
        ledger = reef.Ledger()
        alive = sum(ledger.live().values())
        ledger.reset_peak()
        y = call(net, x)
        if y.requires_grad:
            y.pow(2).mean().backward()
        peak = ledger.peak().total - alive
        return [y.detach(), x.grad, *(p.grad for p in net.parameters()), *net.buffers()], peak

    def step(self, seed):
        self.requires_grad = self.random.random() < 0.3
        probe = torch.randn(self.batch, self.length, WIDTH).requires_grad_(self.requires_grad)
        profile = reef.Chain(self.net).profile(probe, repeats=1)
        share = self.random.random()
        within = int(profile.minimum_bytes + share * (profile.natural_peak_bytes - profile.minimum_bytes))
        other = copy.deepcopy(self.net)
        for mine, copied in zip(self.net.parameters(), other.parameters(), strict=True):
            copied.grad = None if mine.grad is None else mine.grad.clone()
        plain, _ = self.run(other, lambda net, x: net(x), seed)
        ours, peak = self.run(self.net, lambda net, x: reef.checkpoint_sequential(net, x, within), seed)
        for a, b in zip(plain, ours, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), self.log
        assert peak <= within * 1.02 + 4 * probe.nbytes + 8192 * (len(self.net) + 1), self.log


@pytest.mark.parametrize("seed", range(16))
def test_every_step_is_the_plain_one_within_its_bytes(seed):
    program = Program(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="PlannedChain")
        for step in range(8):
            program.step(1000 * seed + step)
            for _ in range(program.random.randrange(1, 3)):
                program.change()
