"""What the tests of the budget train and look at."""

import gc

import pytest
import torch

import reef

MANY = 1 << 40


def live(budget):
    return budget.use().live_bytes


def deep_net(layers=8, width=256):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())])


@pytest.fixture(autouse=True, params=["go", "stay"])
def addresses(request, monkeypatch):
    """Both ways for a tensor to be away, where the process may have them."""
    monkeypatch.setenv("REEF_ADDRESSES", request.param)
    if request.param == "stay" and reef.addresses_here() != "stay":
        pytest.skip(f"addresses {reef.addresses_here()}")
    gc.collect()  # pages that an earlier test has left would keep the other way
    with reef.budget(MANY, addresses=request.param):
        pass
    return request.param


go_only = pytest.mark.parametrize("addresses", ["go"], indirect=True)
"""What is expected only where a tensor that is away has no address, or only of budgets that are exact to the byte."""
