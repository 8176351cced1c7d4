"""The ledger under Python: the same engine as in C++, so these tests ask what only Python can spoil."""

import json
import threading
import xml.etree.ElementTree

import pytest
import torch
from ranks import HANG_SECONDS

import reef


def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64))


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.randn(32, 64)).pow(2).mean().backward()
    optimizer.step()


def state_bytes(optimizer):
    return sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))


def test_counts_what_a_tensor_asks_for():
    ledger = reef.Ledger()
    before = sum(ledger.live().values())
    tensor = torch.empty(1000)
    assert sum(ledger.live().values()) - before == 4000
    del tensor
    assert sum(ledger.live().values()) == before


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda p, f: torch.optim.AdamW(p, foreach=f),
        lambda p, f: torch.optim.Adam(p, amsgrad=True, foreach=f),
        lambda p, f: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=f),
        lambda p, f: torch.optim.SGD(p, lr=0.1, foreach=f),
        lambda p, f: torch.optim.RMSprop(p, foreach=f),
        lambda p, f: torch.optim.Adagrad(p, foreach=f),
    ],
    ids=["AdamW", "Adam amsgrad", "SGD momentum", "SGD", "RMSprop", "Adagrad"],
)
def test_categories_are_the_sums_of_their_tensors(make, foreach):
    ledger = reef.Ledger()
    net = model()
    optimizer = make(net.parameters(), foreach)
    ledger.watch(net)
    ledger.watch(optimizer)
    parameters = sum(p.nbytes for p in net.parameters())
    for _ in range(2):
        step(net, optimizer)
        live = ledger.live()
        assert live["parameter"] == parameters
        assert live["gradient"] == parameters
        assert live["optimizer state"] == state_bytes(optimizer)
        assert live["activation"] == 0
        assert sum(live.values()) == reef.allocator_live_bytes()


def test_a_model_older_than_the_ledger_is_adopted(tmp_path):
    # In a process of its own: here a ledger has long been made.
    import subprocess
    import sys

    program = """
import torch
net = torch.nn.Linear(100, 10, bias=False)
import reef
ledger = reef.Ledger()
ledger.watch(net)
assert ledger.live()["parameter"] == 4000, ledger.live()
del net
assert ledger.live()["parameter"] == 0, ledger.live()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_SECONDS)


def test_peak_names_the_operator():
    ledger = reef.Ledger()
    ledger.reset_peak()
    torch.mm(torch.empty(512, 16), torch.empty(16, 512))
    assert ledger.peak().op == "aten::mm"
    assert ledger.peak().total == sum(ledger.peak().bytes.values())


def test_timeline_replays_to_the_live_bytes_and_its_pictures_are_well_formed(tmp_path):
    ledger = reef.Ledger()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    ledger.watch(net)
    ledger.watch(optimizer)
    step(net, optimizer)
    ledger.start_timeline()
    step(net, optimizer)
    timeline = ledger.stop_timeline()
    assert timeline.events_dropped == 0
    assert timeline.bytes_after(len(timeline.events)) == ledger.live()
    for count in range(len(timeline.events) + 1):
        assert min(timeline.bytes_after(count).values()) >= 0
    timeline.save_chart(tmp_path / "c.svg", title="a < b & c", budget_bytes=1 << 20)
    timeline.save_trace(tmp_path / "t.json")
    assert xml.etree.ElementTree.parse(tmp_path / "c.svg").getroot().tag.endswith("svg")
    counters = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "C"]
    assert len(counters) > 10


def test_other_threads_and_data_loaders_are_counted():
    ledger = reef.Ledger()
    before = sum(ledger.live().values())
    kept = []
    threads = [threading.Thread(target=lambda: kept.append(torch.empty(1000))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(ledger.live().values()) - before == 8 * 4000
    loader = torch.utils.data.DataLoader(torch.arange(64.0).view(16, 4), batch_size=4, num_workers=2)
    assert sum(batch.sum().item() for batch in loader) == 64 * 63 / 2  # forked workers allocate and exit


def test_category_scope():
    ledger = reef.Ledger()
    with reef.category_scope("communication buffer"):
        buffer = torch.empty(1000)
    assert ledger.live()["communication buffer"] == 4000
    ledger.mark(buffer, "optimizer state")
    assert ledger.live()["communication buffer"] == 0
    outside = torch.empty(10)
    assert outside is not None and ledger.live()["communication buffer"] == 0


def test_bad_input_is_met_with_a_sentence():
    ledger = reef.Ledger()
    with pytest.raises(ValueError, match="is not a category"):
        ledger.mark(torch.empty(1), "weights")
    with pytest.raises(ValueError, match="no timeline is being recorded"):
        ledger.stop_timeline()
    with pytest.raises(ValueError, match="counts cpu and cuda"):
        ledger.live("meta")


def test_table_shows_every_category():
    table = reef.Ledger().table()
    assert all(category in table for category in reef.CATEGORIES)
