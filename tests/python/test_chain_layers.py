"""A network that changes between steps, or has a layer at several places, is run as it is now and within the bytes given."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import reef

WIDTH = 96


def stage(hidden=384):
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(0.25), nn.Linear(hidden, WIDTH))


def network(count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(stage() for _ in range(count))), torch.randn(192, WIDTH)


class Adapter(nn.Module):
    def __init__(self, inner, rank=4):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down, self.up = nn.Linear(inner.in_features, rank, bias=False), nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def left(net, x, call, peaks=None):
    torch.manual_seed(3)
    ledger = reef.Ledger()
    alive = sum(ledger.live().values())
    ledger.reset_peak()
    y = call(x)
    y.pow(2).mean().backward()
    if peaks is not None:
        peaks.append(ledger.peak().total - alive)
    return [y.detach(), *(None if p.grad is None else p.grad.clone() for p in net.parameters())]


def same(a, b):
    return len(a) == len(b) and all((p is None) == (q is None) and (p is None or torch.equal(p, q)) for p, q in zip(a, b, strict=True))


def replace_inner(net):
    net[2][0] = Adapter(net[2][0])


def swap(net):
    net[1], net[4] = net[4], net[1]


def grow(net):
    net[3][0].weight = nn.Parameter(torch.randn(512, WIDTH) * 0.1)
    net[3][0].bias = nn.Parameter(torch.zeros(512))
    net[3][3].weight = nn.Parameter(torch.randn(WIDTH, 512) * 0.1)


CHANGES = {
    "frozen": lambda net: net[:4].requires_grad_(False),
    "a bias unfrozen": lambda net: net[0][0].bias.requires_grad_(True),
    "unfrozen": lambda net: net.requires_grad_(True),
    "replaced": lambda net: net.__setitem__(3, stage(64)),
    "replaced by one that is larger": lambda net: net.__setitem__(3, stage(800)),
    "of the same shape, another function": lambda net: net.__setitem__(1, nn.Sequential(*net[1][:1], nn.Tanh(), *net[1][2:])),
    "replaced within": replace_inner,
    "appended": lambda net: net.append(stage()),
    "inserted": lambda net: net.insert(0, nn.Tanh()),
    "taken out": lambda net: net.__delitem__(0),
    "in another order": swap,
    "parameters of other shapes": grow,
    "evaluating": lambda net: net.eval(),
    "one training": lambda net: net[0].train(),
    "training": lambda net: net.train(),
    "gradients there": lambda net: [setattr(p, "grad", torch.zeros_like(p)) for p in net.parameters() if p.requires_grad],
    "gradients gone": lambda net: net.zero_grad(),
    "the same one twice more": lambda net: net.extend([net[2], net[2]]),
    "doubled": lambda net: net.double(),
}


@pytest.mark.parametrize("way", ["one line", "an object"])
def test_after_every_change_the_network_as_it_is_now_is_run_within_its_bytes(way):
    net, x = network()
    planned = reef.PlannedChain(net)
    run = planned if way == "an object" else lambda x, within: reef.checkpoint_sequential(net, x, within)
    within = 0
    for change, apply in CHANGES.items():
        apply(net)
        x = x.to(next(net.parameters()).dtype)
        gradients = [p.grad for p in net.parameters()]
        other = copy.deepcopy(net)
        plain = left(other, x, other)
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        profile = reef.Chain(net).profile(x, repeats=1)
        within = (profile.minimum_bytes + profile.natural_peak_bytes) // 2
        peaks = []
        ours = left(net, x, lambda x: run(x, within), peaks)
        assert same(plain, ours), change
        assert peaks[0] <= within * 1.02 + 4 * x.nbytes + 1024, change
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient


def test_plans_with_the_same_bytes_follow_what_is_frozen():
    net, x = network()
    net[:5].requires_grad_(False)
    frozen = reef.plan_of(net, x, "64MiB")
    net.requires_grad_(True)
    assert reef.plan_of(net, x, "64MiB").profile.natural_peak_bytes > frozen.profile.natural_peak_bytes
    within = frozen.profile.minimum_bytes
    with pytest.raises(reef.BudgetError):
        reef.checkpoint_sequential(net, x, within)
    net[:5].requires_grad_(False)
    assert reef.plan_of(net, x, "64MiB").profile == frozen.profile  # still known
    reef.checkpoint_sequential(net, x, within).sum().backward()


def shared_activation():
    act = nn.ReLU()
    return [nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), act]


def shared_block():
    return [stage()] * 5


def shared_in_place():
    act = nn.ReLU(inplace=True)
    return [nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), act]


def shared_norm():
    norm = nn.BatchNorm1d(WIDTH)
    return [nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), norm, nn.Linear(WIDTH, WIDTH), norm]


@pytest.mark.parametrize("make", [shared_activation, shared_block, shared_in_place, shared_norm])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_module_at_several_places_runs_at_each(make, part):
    torch.manual_seed(0)
    net, x = nn.Sequential(*make()), torch.randn(64, WIDTH, requires_grad=True)
    other = copy.deepcopy(net)
    plain = left(other, x, other) + [b.clone() for b in other.buffers()]
    chain = reef.Chain(net)
    assert len(chain) == len(net)
    profile = chain.profile(x)
    within = profile.minimum_bytes + (profile.natural_peak_bytes - profile.minimum_bytes) * part // 2
    ours = left(net, x, lambda x: reef.checkpoint_sequential(net, x, within)) + [b.clone() for b in net.buffers()]
    assert same(plain, ours)


def test_a_gradient_that_several_stages_add_to_is_counted_once():
    shared, x = nn.Sequential(*shared_block()), torch.randn(64, WIDTH, requires_grad=True)
    for _ in range(2):  # autograd holds what they have made so far beside a gradient that is there
        profile = reef.Chain(shared).profile(x, repeats=1)
        assert [each.gradient_bytes > 0 for each in profile.stages] == [False] * 4 + [True]  # the first that goes backward
        assert profile.stages[-1].gradient_bytes == sum(p.nbytes for p in shared.parameters())
        shared(x).sum().backward()


def test_a_chain_of_layers_that_are_no_longer_there_is_refused():
    net, x = network(3)
    chain = reef.Chain(net)
    schedule = reef.plan_chain(chain.profile(x, repeats=1), "1GiB")
    net[1] = stage()
    for use in (lambda: chain.run(schedule, x), lambda: chain.profile(x)):
        with pytest.raises(ValueError, match="other layers now"):
            use()
    net.append(stage())
    with pytest.raises(ValueError, match="other layers now"):
        chain.run(schedule, x)


def test_a_sequential_with_a_forward_or_hooks_of_its_own_is_refused():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="a forward of its own"):
        reef.checkpoint_sequential(Residual(nn.Linear(4, 4)), x, "1MiB")
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].register_forward_hook(lambda _, __, y: y * 2)  # of a layer: part of the stage
    assert torch.equal(reef.checkpoint_sequential(net, x, "1MiB"), net(x))
    hook = net.register_forward_hook(lambda _, __, y: y + 1)
    with pytest.raises(ValueError, match="hooks of its own"):
        reef.checkpoint_sequential(net, x, "1MiB")
    hook.remove()
    net.forward = lambda x: x
    with pytest.raises(ValueError, match="a forward of its own"):
        reef.PlannedChain(net)(x, "1MiB")


def test_a_part_of_a_sequential_is_known_the_next_time():
    calls = []
    net, x = network(4)
    net[1].register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):  # without gradients, and with
        reef.checkpoint_sequential(net[:3], x, "1GiB").sum().backward()
    calls.clear()
    reef.checkpoint_sequential(net[:3], x, "1GiB").sum().backward()
    assert len(calls) == 1
    assert len(reef.plan_of(net[:2], x, "1GiB").profile.stages) == 2
    assert len(reef.plan_of(net, x, "1GiB").profile.stages) == 4


def test_layers_that_have_gone_are_not_kept():
    net, x = network(3)
    reef.checkpoint_sequential(net, x, "1GiB").sum().backward()
    gone = weakref.ref(net[1])
    net[1] = stage()
    reef.checkpoint_sequential(net, x, "1GiB").sum().backward()
    gc.collect()
    assert gone() is None


def test_callables_that_refer_to_modules_are_planned_for_as_these_are():
    net, x = network(4)
    blocks = nn.ModuleList(net)
    stages = [lambda x, block=block: block(x) for block in blocks[:2]] + [blocks[2].forward, blocks[3]]
    planned = reef.PlannedChain(stages, repeats=1)
    blocks.requires_grad_(False)
    blocks[3].requires_grad_(True)
    frozen = planned.plan(x, "1GiB").profile
    blocks.requires_grad_(True)
    assert all(each.gradient_bytes > 0 for each in planned.plan(x, "1GiB").profile.stages)
    assert sum(each.gradient_bytes > 0 for each in frozen.stages) == 1
