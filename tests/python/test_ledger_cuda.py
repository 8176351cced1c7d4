"""A ledger of a CUDA device that begins when there are tensors already."""

import pytest
import torch

import reef

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_what_is_older_than_the_first_ledger_is_counted_when_it_is_watched():
    net = torch.nn.Linear(64, 32, device="cuda")
    other = torch.ones(1000, device="cuda")
    ledger = reef.Ledger()
    assert sum(ledger.live("cuda").values()) == 0
    ledger.watch(net)
    ledger.watch(net)  # It is counted once.
    assert {category: bytes for category, bytes in ledger.live("cuda").items() if bytes} == {"parameter": 4 * (64 * 32 + 32)}
    ledger.mark(other[10:], "activation")  # A view counts as the block that it is of.
    assert sum(ledger.live("cuda").values()) == 4 * (64 * 32 + 32 + 1000)
    del net, other
    assert sum(ledger.live("cuda").values()) == 0
