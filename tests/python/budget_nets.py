"""What the tests of the budget train and look at."""

import torch

MANY = 1 << 40


def live(budget):
    return budget.use().live_bytes


def deep_net(layers=8, width=256):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())])
