"""Functions that read what they also write: what a checkpointed step leaves is what the plain one leaves, bit for bit, or
there is an error."""

import copy

import pytest
import torch
from torch import nn

import reef

WIDTH = 12


class Stateful(nn.Module):
    """A linear layer with something that is carried from call to call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("bank", torch.linspace(0, 1, 4 * WIDTH).view(4, WIDTH).clone())
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.plain = torch.ones(WIDTH)
        self.past = []
        self.table = None
        self.scratch = None

    def forward(self, x):
        return self.way(self, x)


def average_in_place(m, x):
    y = m.linear(x)
    m.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return (y - m.average).tanh()


def average_by_lerp_and_saved(m, x):
    y = m.linear(x)
    m.average.lerp_(y.detach().mean(0), 0.1)
    return y * (m.average * 2)


def read_and_then_copied_into(m, x):
    y = m.linear(x) * (m.average + 1)
    m.average.copy_(y.detach().mean(0))
    return y.sin()


def average_through_data(m, x):
    y = m.linear(x)
    m.average.data.mul_(0.5)
    m.average.data.add_(y.detach().mean(0))
    return (y * (m.average + 1)).sin()


def average_through_a_view(m, x):
    half = m.average[: WIDTH // 2]
    half += m.linear(x).detach().mean(0)[: WIDTH // 2]
    return (m.linear(x) + m.average).exp()


def average_by_out(m, x):
    y = m.linear(x)
    torch.add(m.average, y.detach().mean(0), out=m.average)
    return (y * (m.average + 1)).sin()


def average_replaced(m, x):
    y = m.linear(x)
    m.average = 0.9 * m.average + 0.1 * y.detach().mean(0)
    return (y - m.average).tanh()


def attribute_replaced(m, x):
    y = m.linear(x) * (m.plain + 1)
    m.plain = y.detach().mean(0)
    return y.sin()


def memory_bank(m, x):
    y = m.linear(x)
    scores = (y @ (m.bank.clone() + 1).t()).softmax(-1)
    m.bank[m.at] = y.detach().mean(0)
    m.at.add_(1).remainder_(4)
    return scores @ m.bank.clone() + y


def written_and_then_read_whole(m, x):
    y = m.linear(x)
    m.bank[m.at % 4] = y.detach().mean(0)
    m.at += 1
    return (y @ (m.bank + 1).t()).sin() @ (m.bank + 2)


def decided_by_a_counter(m, x):
    m.at += 1
    return m.linear(x).sin() if m.at.item() % 2 else m.linear(x).exp()


def overwritten_first(m, x):
    y = m.linear(x)
    m.average.copy_(y.detach().mean(0))
    return (y - m.average).exp()


def spectral(m, x):
    with torch.no_grad():
        m.average.copy_(nn.functional.normalize(m.linear.weight @ (m.average + 0.1), dim=0))
    return x @ (m.linear.weight / (m.average.clone() @ m.linear.weight).norm()).t().sin()


def weight_clamped(m, x):
    with torch.no_grad():
        m.linear.weight.mul_(0.9)
    return m.linear(x).sin().exp()


def table_made_at_first(m, x):
    if m.table is None:
        m.table = torch.arange(WIDTH, dtype=torch.float).add(1).cos()
    return (m.linear(x) * m.table).sin()


def scratch_memory(m, x):
    if m.scratch is None or m.scratch.shape != x.shape:
        m.scratch = torch.empty_like(x)
    m.scratch.copy_(x.detach())
    return (m.linear(x) * (m.scratch + 1)).sin()


def updated_after(m, x):
    y = m.linear(x).sin().exp()
    m.average.add_(y.detach().mean(0))
    return y


def norm_by_hand(m, x):
    y = m.linear(x)
    with torch.no_grad():
        m.average.copy_(0.9 * m.average + 0.1 * y.mean(0))
    return (y - y.mean(0)).sin()


def noise_that_is_saved_before_it_is_drawn(m, x):
    return nn.functional.rrelu(m.linear(x), training=True)


WAYS = [way for way in list(globals().values()) if getattr(way, "__module__", "") == __name__ and callable(way) and way is not Stateful]


def network(way, count=3):
    torch.manual_seed(0)
    layers = [Stateful() for _ in range(count)]
    for layer in layers:
        layer.way = way
    return nn.Sequential(*layers), [torch.randn(6, WIDTH, requires_grad=True) for _ in range(2)]


def left(net, inputs, call, pattern):
    torch.manual_seed(5)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    if pattern == "one after the other":
        for x in inputs * 2:
            call(net, x).pow(2).mean().backward()
    elif pattern == "both, then backward":
        sum(call(net, x).pow(2).mean() for x in inputs).backward()
    else:
        loss = call(net, inputs[0]).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    state = [tensor for m in net for tensor in (m.average, m.bank, m.at, m.plain, m.table) if tensor is not None]
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [*gradients, *net.parameters(), *state, *(x.grad for x in inputs if x.grad is not None)]


def whole(net, x):
    return reef.checkpoint(net, x)


def by_stage(net, x):
    for layer in net:
        x = reef.checkpoint(layer, x)
    return x


def closure(net, x):
    return reef.checkpoint(lambda x: net[1](net[0](x)) + net[2](x), x)


def nested(net, x):
    return reef.checkpoint(lambda x: reef.checkpoint(net[2], reef.checkpoint(net[1], net[0](x))), x)


def least(net, x):
    within = reef.Chain(net).profile(x, repeats=1).minimum_bytes
    return reef.checkpoint_sequential(net, x, within)


CALLS = {"whole": whole, "by stage": by_stage, "closure": closure, "nested": nested, "chain": least}


@pytest.mark.parametrize("pattern", ["one after the other", "both, then backward", "retained"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_leaves_what_the_plain_call_leaves(way, call, pattern):
    net, inputs = network(way)
    plain_call = (lambda net, x: net[1](net[0](x)) + net[2](x)) if call == "closure" else lambda net, x: net(x)
    try:
        plain = left(copy.deepcopy(net), inputs, plain_call, pattern)
    except RuntimeError as error:  # autograd saves what is modified later
        assert "modified by an inplace operation" in str(error)
        with pytest.raises(RuntimeError, match="modified"):
            left(net, inputs, CALLS[call], pattern)
        return
    ours = left(net, inputs, CALLS[call], pattern)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_what_another_writes_between_is_refused():
    bias, x = torch.zeros(4), torch.ones(4, requires_grad=True)
    y = reef.checkpoint(lambda x: (x + bias).sin(), x)
    bias.add_(1)  # autograd has saved nothing of it
    with pytest.raises(RuntimeError, match="a tensor that it reads, Float .4., has been modified in place"):
        y.sum().backward()


def test_what_is_carried_where_nobody_sees_it_is_refused():
    held = {"state": [torch.zeros(4)]}

    class Holder:
        state = torch.zeros(4)

    holder = Holder()

    def in_an_object(x):
        y = (x + holder.state).sin()
        holder.state = holder.state * 0.5 + y.detach()
        return (y * holder.state).exp()

    def in_a_list(x):
        held["state"].append(held["state"][-1] + x.detach())
        return (x * held["state"][-1]).exp()

    for function in (in_an_object, in_a_list):
        y = reef.checkpoint(function, torch.ones(4, requires_grad=True))
        with pytest.raises(RuntimeError, match="carries"):
            y.sum().backward()


def test_a_table_that_the_first_run_makes_is_found_by_the_second():
    tables = {}

    def function(x):
        if len(x) not in tables:
            tables[len(x)] = torch.arange(len(x)).add(1.0).cos()
        return (x * tables[len(x)]).sin()

    x = torch.ones(4, requires_grad=True)
    reef.checkpoint(function, x).sum().backward()
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(x.grad, wanted)


def test_into_a_tensor_of_a_graph_is_refused():
    outside = torch.ones(4, requires_grad=True) * 2
    y = reef.checkpoint(lambda x: outside.add_(x).sin(), torch.ones(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified|would do so twice|modified by an inplace"):
        y.sum().backward()


def test_only_what_is_both_read_and_written_is_copied_and_it_is_counted():
    norm = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())
    ledger = reef.Ledger()

    def kept(net, x):
        before = sum(ledger.live().values())
        y = reef.checkpoint(net, x)
        return sum(ledger.live().values()) - before - y.nbytes

    x = torch.randn(32, 64, requires_grad=True)
    kept(norm, x)
    assert kept(norm, x) == 0
    net, inputs = network(average_in_place, 1)
    assert 4 * WIDTH <= kept(net, inputs[0]) <= 8 * WIDTH
    profile = reef.Chain(network(average_in_place)[0]).profile(inputs[0])
    assert profile.state_bytes == 3 * 4 * WIDTH
    assert reef.ChainProfile.from_json(profile.json()) == profile
    without = reef.ChainProfile(profile.stages)
    assert profile.minimum_bytes == without.minimum_bytes + profile.state_bytes
    assert profile.natural_peak_bytes == without.natural_peak_bytes + profile.state_bytes
    with pytest.raises(reef.BudgetError, match=str(profile.minimum_bytes)):
        reef.plan_chain(profile, profile.minimum_bytes - 1)
    assert reef.plan_chain(profile, profile.minimum_bytes).cost(profile).peak_bytes == profile.minimum_bytes


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_profile_leaves_what_it_found(way):
    net, (x, _) = network(way)
    before = copy.deepcopy(net)
    reef.Chain(net).profile(x)
    reef.plan_of(net, x, "1GiB")
    for a, b in zip(net, before, strict=True):
        assert all(torch.equal(p, q) for p, q in zip((*a.parameters(), *a.buffers(), a.plain), (*b.parameters(), *b.buffers(), b.plain), strict=True))
        assert a.table is None


def test_is_undone_says_so():
    seen = []

    def function(x):
        seen.append(reef.is_undone())
        return x.exp()

    reef.checkpoint(function, torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [False, True]
    assert not reef.is_undone()
