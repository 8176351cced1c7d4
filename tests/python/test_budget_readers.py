"""Who reads a budget's memory without an operator, or keeps a pointer to it over operators: right, or told."""

import contextlib
import copy
import ctypes
import io

import pytest
import torch
from budget_nets import MANY, addresses, deep_net, go_only, live  # noqa: F401 (a fixture)
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import reef

# ---- reading without an operator


def saved(net, optimizer):
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict()], file)
    return file.getvalue()


# Each gives bytes, which a budget does not count.
READERS = {
    "torch.save": saved,
    "copy.deepcopy": lambda net, optimizer: [v.clone().numpy().tobytes() for v in copy.deepcopy(net.state_dict()).values()],
    "deepcopy of a module": lambda net, optimizer: [p.detach().clone().numpy().tobytes() for p in copy.deepcopy(net).parameters()],
    "tolist": lambda net, optimizer: [p.detach().tolist() for p in net.parameters()],
}


def step_of(net, optimizer, number):
    optimizer.zero_grad()
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(number))
    loss = net(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("reader", READERS)
def test_whole_tensors_are_read_in_a_tight_budget(reader):
    def run(around):
        net = deep_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
        losses = [step_of(net, optimizer, number) for number in range(2)]
        with around(net, optimizer) as whole:
            for number in range(2, 6):
                losses.append(step_of(net, optimizer, number))
                with whole(net, optimizer):
                    read = READERS[reader](net, optimizer)
        return losses, read

    @contextlib.contextmanager
    def plainly(*_):
        yield lambda *_: contextlib.nullcontext()

    @contextlib.contextmanager
    def tightly(*targets):
        with reef.budget(MANY, *targets) as budget:
            budget.set_bytes(live(budget) // 2)
            yield budget.whole
            assert budget.use().evictions > 20

    losses, want = run(plainly)
    found, read = run(tightly)
    assert found == losses
    assert read == want


@go_only
def test_whole_says_what_it_costs_and_gives_it_back():
    net = deep_net()
    size = sum(p.nbytes for p in net.parameters())
    with reef.budget(MANY, net) as budget:
        outside = live(budget) - size
        budget.set_bytes(outside + size // 2)
        with budget.whole(net) as cost:
            assert cost == sum(p.nbytes for p in net.parameters() if p.nbytes >= 1024)
            assert live(budget) == outside + size
            with budget.whole(net) as again:
                assert again == 0, "they are there already"
            assert live(budget) == outside + size
        assert live(budget) <= outside + size // 2
        with budget.whole():  # the budget's own targets
            assert live(budget) == outside + size
    with budget.whole(net) as cost:
        assert cost == 0


@go_only
def test_what_is_away_is_named():
    net = deep_net()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    step_of(net, optimizer, 0)
    with reef.budget(MANY, net, optimizer) as budget:
        for tensor, name in ((net[2].weight, "'2.weight'"), (optimizer.state[net[2].weight]["exp_avg"], "'exp_avg of 2.weight'")):
            squeeze_out(budget, tensor)
            with pytest.raises(RuntimeError, match=f"{name}.*budget.whole"):
                tensor.data_ptr()
        budget.set_bytes(MANY)


def squeeze_out(budget, tensor):
    """Everything leaves but what is used meanwhile."""
    budget.set_bytes(MANY)
    with contextlib.suppress(reef.BudgetError):
        budget.set_bytes(1 << 20)
        return
    for part in range(1, 200):
        with contextlib.suppress(reef.BudgetError):
            budget.set_bytes(live(budget) - part * 4096)
    with contextlib.suppress(RuntimeError):
        tensor.data_ptr()
        pytest.fail("it did not leave")


@go_only
def test_more_bytes_bring_back_what_fits():
    tensors = [torch.full((1000,), float(i)) for i in range(20)]
    with reef.budget(MANY, tensors) as budget:
        there = live(budget)
        budget.set_bytes(there - 10 * 4000)
        budget.set_bytes(there - 5 * 4000)
        assert live(budget) == there - 5 * 4000
        budget.set_bytes(MANY)
        assert live(budget) == there
        assert [tensor.tolist()[0] for tensor in tensors] == list(range(20))


# ---- who keeps pointers


def test_a_packed_lstm_keeps_its_lengths():
    def train(part):
        torch.manual_seed(0)
        net = torch.nn.ModuleDict({"e": torch.nn.Linear(16, 16), "r": torch.nn.LSTM(16, 16, batch_first=True), "o": torch.nn.Linear(16, 1)})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
        lengths = torch.tensor([300 - 7 * i for i in range(8)])
        losses = []
        with reef.budget(part or MANY, net) as budget:
            for number in range(4):
                optimizer.zero_grad()
                x = torch.randn(8, 300, 16, generator=torch.Generator().manual_seed(number))
                packed = pack_padded_sequence(net["e"](x), lengths, batch_first=True)
                y, _ = pad_packed_sequence(net["r"](packed)[0], batch_first=True)
                loss = net["o"](y).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses, budget.use()

    plain, use = train(None)
    for part in (0.7, 0.5):
        found, within = train(max(int(use.peak_bytes * part), use.minimum_bytes))
        assert found == plain
        assert within.evictions > 0


def test_a_composite_operator_of_the_program_keeps_what_it_was_given():
    with torch.library._scoped_library("reef_test_edges", "DEF") as library:
        library.define("kept(Tensor x, Tensor[] more) -> Tensor")

        def kept(x, more):
            address = x.data_ptr()
            sums = [(other * 2).sum() for other in more]  # each needs room
            inner = x * 1.0
            inner_address = inner.data_ptr()
            sums += [(other * 3).sum() for other in more]
            read = ctypes.c_float.from_address(address).value + ctypes.c_float.from_address(inner_address).value
            return sum(sums, torch.zeros(())) + read

        library.impl("kept", kept, "CompositeImplicitAutograd")
        x = torch.full((50_000,), 3.0, requires_grad=True)
        more, idle = ([torch.full((50_000,), float(i), requires_grad=True) for i in range(6)] for _ in range(2))
        want = torch.ops.reef_test_edges.kept(x, more).item()
        with reef.budget(MANY, x, more, idle) as budget:
            budget.set_bytes(live(budget) - 3 * 200_000)
            assert torch.ops.reef_test_edges.kept(x, more).item() == want
            budget.set_bytes(live(budget) - 2 * 200_000)
            with contextlib.suppress(RuntimeError):  # refused, or right
                assert torch.ops.reef_test_edges.kept(x, more).item() == want
            assert budget.use().evictions > 5
            budget.set_bytes(MANY)
