"""Options that a program changes between steps: a table of rules and switches, in every format of states.

In float32 the oracle is torch's fused step, for rules that torch has not the documented formula; in fewer bits, a float32 optimizer that begins each step from the same states,
decoded: a step updates the parameter with what it computed in float32.
"""

import pytest
import torch
from optim_rules import every_state, give_gradients, parameters, same

from reef import optim

FUSED = {
    "adam": lambda p, **o: torch.optim.Adam(p, fused=True, **o),
    "adamw": lambda p, **o: torch.optim.AdamW(p, fused=True, **o),
    "sgd": lambda p, **o: torch.optim.SGD(p, fused=True, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, fused=True, **o),
    "rmsprop": lambda p, **o: torch.optim.RMSprop(p, foreach=False, **o),
}
OURS = {
    "adam": optim.Adam, "adamw": optim.AdamW, "sgd": optim.SGD, "adagrad": optim.Adagrad, "rmsprop": optim.RMSprop,
    "lion": optim.Lion, "lamb": optim.LAMB, "lars": optim.LARS,
}  # fmt: skip

COMMON = {
    "lr": [{"lr": 0.01}, {"lr": 0.0}, {"lr": 0.003}],
    "lr to a tensor": [{"lr": 0.5}, {"lr": torch.tensor(0.25)}, {"lr": 0.125}],
    "weight decay": [{"weight_decay": 0.0}, {"weight_decay": 0.1}, {"weight_decay": 0.0}, {"weight_decay": 0.01}],
    "maximize": [{"maximize": False}, {"maximize": True}, {"maximize": True}, {"maximize": False}],
}
BETAS = {"betas": [{"betas": (0.9, 0.99)}, {"betas": (0.5, 0.9)}, {"betas": [0.0, 0.99]}]}
EPS = {"eps": [{"eps": 1e-8}, {"eps": 1e-2}, {"eps": 0.0}]}
AMSGRAD = {"amsgrad off and on": [{"amsgrad": True}, {"amsgrad": False}, {"amsgrad": False}, {"amsgrad": True}]}
MOMENTUM = {
    "momentum from 0": [{"momentum": 0.0}, {"momentum": 0.5}, {"momentum": 0.9}],
    "momentum much later": [{}, {}, {}, {"momentum": 0.9, "dampening": 0.3}, {}],
    "momentum off and on": [{"momentum": 0.9}, {}, {"momentum": 0.0}, {}, {"momentum": 0.9}],
    "dampening": [{"momentum": 0.9}, {"dampening": 0.5}, {"dampening": 0.0}, {"dampening": -0.5}],
    "nesterov": [{"momentum": 0.9}, {"nesterov": True}, {"nesterov": False}],
    "nesterov and dampening": [{"momentum": 0.9, "dampening": 0.2}, {"nesterov": True}, {}],
    "nesterov before a momentum": [{"nesterov": True}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"maximize": True}],
}
LARS = {k: v for k, v in MOMENTUM.items() if k in ("momentum from 0", "dampening", "nesterov", "nesterov and dampening")}
SWITCHES = {
    "adam": {**COMMON, **BETAS, **EPS, **AMSGRAD,
             "decoupled": [{"weight_decay": 0.1}, {"decoupled_weight_decay": True}, {"decoupled_weight_decay": False}]},
    "adamw": {**COMMON, **BETAS, **EPS, **AMSGRAD},
    "sgd": {**COMMON, **MOMENTUM},
    "adagrad": {**COMMON, **EPS, "lr decay": [{"lr_decay": 0.0}, {"lr_decay": 0.5}, {"lr_decay": 0.1}]},
    "rmsprop": {**COMMON, **EPS, "alpha": [{"alpha": 0.99}, {"alpha": 0.5}],
                "momentum off and on": MOMENTUM["momentum off and on"],
                "centered off and on": [{"centered": True}, {"centered": False}, {"centered": True}]},
    "lion": {**COMMON, **BETAS},
    "lamb": {**COMMON, **BETAS, **EPS},
    "lars": {**COMMON, **LARS, "trust": [{"trust_coefficient": 0.1}, {"trust_coefficient": 0.001}]},
}  # fmt: skip
ROWS = [(rule, switch) for rule, switches in SWITCHES.items() for switch in switches]
LATE = [("adam", {"amsgrad": True}, "max_exp_avg_sq"), ("adamw", {"amsgrad": True}, "max_exp_avg_sq"),
        ("rmsprop", {"momentum": 0.9}, "momentum_buffer"), ("rmsprop", {"centered": True}, "grad_avg")]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's threads cut vectors in two
    torch.ones(16).sqrt()
    yield
    torch.set_num_threads(threads)


def begins(rule, switch):
    """Options of the first step are given to the constructor, where torch's optimizers begin what they need."""
    first = SWITCHES[rule][switch][0]
    return {} if first.get("nesterov") or "decoupled_weight_decay" in first else dict(first)


def steps(rule, switch):
    """Each row of options holds for two steps."""
    return [options for options in SWITCHES[rule][switch] for _ in range(2)]


def change(optimizer, options):
    optimizer.param_groups[0].update(options)


@pytest.mark.parametrize("rule, switch", [row for row in ROWS if row[0] in FUSED])
def test_switched_between_steps_as_torch_does(rule, switch):
    expected, found = parameters(), parameters()
    a, b = (make(p, **begins(rule, switch)) for make, p in ((FUSED[rule], expected), (OURS[rule], found)))
    for step, options in enumerate(steps(rule, switch)):
        for optimizer, params in ((a, expected), (b, found)):
            change(optimizer, options)
            give_gradients(params, step)
            optimizer.step()
        if rule != "rmsprop":
            assert same(expected, found), f"step {step}"
            continue
        for p, q in zip(expected, found, strict=True):  # torch's roots are off in the last place
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-6), f"step {step}"
            q.data.copy_(p.data)
        b.load_state_dict(a.state_dict())


def lion(p, g, s, o, step):
    beta1, beta2 = o["betas"]
    moved = p * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * (beta1 * s["exp_avg"] + (1 - beta1) * g).sign()
    return moved, {"exp_avg": beta2 * s["exp_avg"] + (1 - beta2) * g}


def lamb(p, g, s, o, step):
    beta1, beta2 = o["betas"]
    m, v = beta1 * s["exp_avg"] + (1 - beta1) * g, beta2 * s["exp_avg_sq"] + (1 - beta2) * g * g
    update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + o["eps"]) + o["weight_decay"] * p
    trust = p.norm() / update.norm() if p.dim() > 1 else 1
    return p - o["lr"] * trust * update, {"exp_avg": m, "exp_avg_sq": v}


def lars(p, g, s, o, step):
    decay, momentum = o["weight_decay"], o["momentum"]
    trust = o["trust_coefficient"] * p.norm() / (g.norm() + decay * p.norm() + o["eps"]) if p.dim() > 1 else 1
    g = trust * (g + decay * p)
    buffer = momentum * s["momentum_buffer"] + (1 - o["dampening"]) * g if step > 1 else g
    return p - o["lr"] * (g + momentum * buffer if o["nesterov"] else buffer), {"momentum_buffer": buffer}


FORMULAS = {"lion": lion, "lamb": lamb, "lars": lars}


@pytest.mark.parametrize("rule, switch", [row for row in ROWS if row[0] in FORMULAS])
def test_switched_between_steps_as_the_formula_says(rule, switch):
    params = parameters([(64, 96), (257,)])
    optimizer = OURS[rule](params, **begins(rule, switch))
    for step, options in enumerate(steps(rule, switch), 1):
        change(optimizer, options)
        give_gradients(params, step)
        group = {k: float(v) if k == "lr" else v for k, v in optimizer.param_groups[0].items()}
        sign = -1 if group["maximize"] else 1
        names = [name for name, _ in optimizer._names(optimizer._numbers(group))]
        expected = []
        for p in params:
            state = optimizer.state.get(p) or {name: torch.zeros_like(p) for name in names}
            state = {name: state[name].double() for name in names}
            expected.append(FORMULAS[rule](p.detach().double(), sign * p.grad.double(), state, group, step))
        optimizer.step()
        for p, (moved, state) in zip(params, expected, strict=True):
            assert torch.allclose(p.detach().double(), moved, rtol=1e-5, atol=1e-6), f"step {step}"
            for name, value in state.items():
                assert torch.allclose(optimizer.state[p][name].double(), value, rtol=1e-5, atol=1e-6), f"step {step}"


@pytest.mark.parametrize("rule, switch", ROWS)
@every_state
def test_switched_between_steps_in_every_format(rule, switch, state):
    sizes = [(64, 96), (257,)]
    found, twin = parameters(sizes), parameters(sizes)
    b = OURS[rule](found, state=state, min_quantized_numel=0, **begins(rule, switch))
    for step, options in enumerate(steps(rule, switch)):
        for p, q in zip(found, twin, strict=True):
            q.data.copy_(p.data)
        start = [p.detach().clone() for p in found]
        a = OURS[rule](twin, **begins(rule, switch))
        a.load_state_dict(b.torch_state_dict())
        for optimizer, params in ((a, twin), (b, found)):
            change(optimizer, options)
            give_gradients(params, step)
            optimizer.step()
        for p, q, before in zip(found, twin, start, strict=True):
            # The root's correction is divided by in float32, multiplied with in fewer bits.
            close = 1e-6 * (p.abs() + (p - before).abs()) if "adam" in rule and state != "float32" else 0
            assert ((p - q).abs() <= close).all(), f"step {step}"
        names = [name for name, _ in b._names(b._numbers(b.param_groups[0]))]
        for p, q in zip(found, twin, strict=True):
            assert [n for n in b.state[p] if n in names] == [n for n in a.state[q] if n in names]


def test_adam_with_decoupled_decay_is_adamw_as_torchs_is():
    expected, found, third = parameters(), parameters(), parameters()
    for optimizer, params in (
        (torch.optim.Adam(expected, weight_decay=0.1, decoupled_weight_decay=True, fused=True), expected),
        (optim.Adam(found, weight_decay=0.1, decoupled_weight_decay=True), found),
        (optim.AdamW(third, weight_decay=0.1), third),
    ):
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
    assert same(expected, found) and same(expected, third)


@pytest.mark.parametrize("rule, options, state", LATE)
def test_what_torch_cannot_switch_on_later_is_refused_whole(rule, options, state):
    params = parameters([(300,), (20,)])
    optimizer = OURS[rule]([{"params": params[:1]}, {"params": params[1:]}])
    theirs = FUSED[rule](others := parameters([(20,)]))
    for one, of in ((optimizer, params), (theirs, others)):
        give_gradients(of, 0)
        one.step()
    optimizer.param_groups[1].update(options)
    theirs.param_groups[0].update(options)
    with pytest.raises(KeyError):
        theirs.step()
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=rf"parameter 0 of shape \(20,\) has no state {state}"):
        optimizer.step()
    assert same(params, before)
    optimizer.param_groups[1].update({key: type(value)() for key, value in options.items()})
    optimizer.step()
    assert not torch.equal(params[0], before[0])


def test_parameters_begin_their_momentum_one_by_one():
    expected, found = parameters([(32,), (48,)]), parameters([(32,), (48,)])
    a, b = torch.optim.SGD(expected, 0.1, foreach=False), optim.SGD(found, 0.1)
    b.add_param_group({"params": later(found)})
    a.add_param_group({"params": later(expected)})
    for step in range(8):
        for optimizer, params in ((a, expected), (b, found)):
            if step == 2:
                for group in optimizer.param_groups:
                    group.update(momentum=0.5, dampening=0.5)
            every = [p for group in optimizer.param_groups for p in group["params"]]
            give_gradients(every, step)
            for i, p in enumerate(every):
                if (step + i) % 3 == 0:
                    p.grad = None
            optimizer.step()
        for group, other in zip(a.param_groups, b.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)
                assert ("momentum_buffer" in a.state[p]) == ("momentum_buffer" in b.state.get(q, {}))


def later(params):
    return [torch.nn.Parameter(params[0].detach().clone() + 1)]


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_a_momentum_that_began_late_is_saved_and_resumed(state):
    straight, stopped, fresh = (parameters() for _ in range(3))
    first = None
    for params in (straight, stopped):
        first = optim.SGD(params, 0.1, dampening=0.3, state=state)
        for step in range(6 if params is straight else 3):
            first.param_groups[0]["momentum"] = 0.9 if step > 1 else 0.0
            give_gradients(params, step)
            first.step()
    second = optim.SGD(fresh, 0.1)
    second.load_state_dict(first.state_dict())
    for p, q in zip(fresh, stopped, strict=True):
        p.data.copy_(q.data)
    for step in range(3, 6):
        give_gradients(fresh, step)
        second.step()
    assert same(straight, fresh)


def test_a_skipped_step_begins_no_momentum():
    expected, found = parameters(), parameters()
    a, b = (optim.SGD(p, 0.1, dampening=0.3) for p in (expected, found))
    for step in range(2):
        for optimizer, params in ((a, expected), (b, found)):
            give_gradients(params, step)
            optimizer.step()
    for optimizer in (a, b):
        optimizer.param_groups[0]["momentum"] = 0.9
    b.found_inf = torch.ones(())
    give_gradients(found, 2)
    b.step()
    del b.found_inf
    assert same(expected, found) and "momentum_buffer" not in b.state[found[0]]
    for step in range(3, 5):
        for optimizer, params in ((a, expected), (b, found)):
            give_gradients(params, step)
            optimizer.step()
    assert same(expected, found)
