"""Options are checked whenever they are about to be used, and so is what a step works on: a table of faults and of the
moments at which a program can make them. A refused step, group or optimizer leaves everything as it was."""

import pytest
import torch
from optim_rules import MAKE, every_rule, give_gradients, parameters, run, same, states_of

from reef import Part, optim, set_part

NAN = float("nan")
# An option, a value, what the text says of it, for which rules.
FAULTS = [
    ("lr", "0.1", "lr is '0.1'; give"), ("lr", -1e-3, "lr is -0.001; give"), ("lr", NAN, "lr is nan"),
    ("lr", float("inf"), "lr is inf"), ("lr", None, "lr is None"), ("lr", True, "lr is True"), ("lr", 1j, "lr is 1j"),
    ("lr", [0.1], r"lr is \[0.1\]"), ("lr", torch.tensor([0.1, 0.2]), "lr is a tensor of 2 elements"),
    ("lr", torch.tensor(NAN), r"lr is tensor\(nan\)"), ("lr", torch.tensor(-1.0), r"lr is tensor\(-1.\)"),
    ("lr", torch.tensor(True), "lr is tensor"), ("lr", torch.tensor(1j), "lr is tensor"),
    ("betas", (0.9,), r"betas are \(0.9,\); give two"), ("betas", (0.9, 0.99, 0.999), "betas are"), ("betas", (), "betas are"),
    ("betas", 0.9, "betas are 0.9"), ("betas", ("0.9", 0.99), "betas are"), ("betas", (0.9, 1.0), "betas are"),
    ("betas", (NAN, 0.9), "betas are"), ("betas", (-0.1, 0.9), "betas are"), ("betas", None, "betas are None"),
    ("betas", {0.9: 1, 0.99: 1}, "betas are"), ("betas", "ab", "betas are 'ab'"),
    ("eps", "1e-8", "eps is '1e-8'"), ("eps", -1.0, "eps is -1.0"), ("eps", NAN, "eps is nan"),
    ("weight_decay", "0.1", "weight_decay is '0.1'"), ("weight_decay", -0.1, "weight_decay is -0.1"),
    ("weight_decay", NAN, "weight_decay is nan"), ("weight_decay", None, "weight_decay is None"),
    ("momentum", "0.9", "momentum is '0.9'"), ("momentum", -0.9, "momentum is -0.9"), ("momentum", NAN, "momentum is nan"),
    ("momentum", (0.9, 0.9), "momentum is"), ("dampening", "0", "dampening is '0'"), ("dampening", NAN, "dampening is nan"),
    ("alpha", "0.9", "alpha is '0.9'"), ("alpha", -1, "alpha is -1"), ("lr_decay", NAN, "lr_decay is nan"),
    ("initial_accumulator_value", "1", "initial_accumulator_value is '1'"),
    ("trust_coefficient", -1.0, "trust_coefficient is -1.0"), ("trust_coefficient", "1", "trust_coefficient is '1'"),
    ("amsgrad", "no", "amsgrad is 'no'"), ("nesterov", "yes", "nesterov is 'yes'"), ("centered", 2, "centered is 2"),
    ("maximize", "false", "maximize is 'false'"), ("maximize", None, "maximize is None"),
    ("state", "int3", "state is 'int3'; use one of float32"), ("state", None, "state is None"),
    ("state", torch.int8, "state is torch.int8"), ("master", "gold", "master is 'gold'; use one of none"),
    ("min_quantized_numel", "4096", "min_quantized_numel is '4096'"), ("min_quantized_numel", -1, "min_quantized_numel is -1"),
    ("min_quantized_numel", 0.5, "min_quantized_numel is 0.5"),
]  # fmt: skip
ROWS = [(rule, *fault) for rule, make in MAKE.items() for fault in FAULTS if fault[0] in make(parameters()).defaults]


def all_of(optimizer, params):
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    states = {key: value.clone() for key, value in states_of(optimizer).items()}
    return [p.detach().clone() for p in params], states, groups


def whole(optimizer, params, before):
    after = all_of(optimizer, params)
    return (
        same(before[0], after[0])
        and before[1].keys() == after[1].keys()
        and all(torch.equal(before[1][key], after[1][key]) for key in before[1])
    )


@pytest.mark.parametrize("rule, key, value, text", ROWS)
def test_faults_are_named_at_every_moment(rule, key, value, text):
    make = type(MAKE[rule](parameters()))
    with pytest.raises(ValueError, match=f"^{make.__name__}: {text}"):
        make(parameters(), **{key: value})
    with pytest.raises(ValueError, match=text):
        make([{"params": parameters(), key: value}])
    params, others = parameters(), parameters([(8,)])
    optimizer = MAKE[rule](params)
    run(optimizer, params, 1)
    with pytest.raises(ValueError, match=f"^{make.__name__}, group 1: {text}"):
        optimizer.add_param_group({"params": others, key: value})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": others})
    run(optimizer, params + others, 1)
    good = optimizer.param_groups[1][key]
    optimizer.param_groups[1][key] = value
    give_gradients(params + others, 2)
    before = all_of(optimizer, params + others)
    with pytest.raises(ValueError, match=f"^{make.__name__}, group 1: {text}"):
        optimizer.step()
    assert whole(optimizer, params + others, before)
    with pytest.raises(ValueError, match=text):
        MAKE[rule]([{"params": parameters()}, {"params": parameters([(8,)])}]).load_state_dict(optimizer.state_dict())
    optimizer.param_groups[1][key] = good
    optimizer.step()
    assert not whole(optimizer, params + others, before)


NUMBERS = [0.01, 1, torch.tensor(0.01), torch.tensor([0.01]), torch.tensor(1), torch.tensor(0.01).double()]


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_of_every_kind_are_taken(value):
    params, expected = parameters(), parameters()
    run(optim.SGD(params, lr=value, weight_decay=value), params, 2)
    run(optim.SGD(expected, lr=float(value), weight_decay=float(value)), expected, 2)
    assert same(params, expected)


@every_rule
@pytest.mark.parametrize("key, meant", [
    ("weight_decy", "weight_decay"), ("weigth_decay", "weight_decay"), ("weightdecay", "weight_decay"), ("wd", "weight_decay"),
    ("Weight-Decay", "weight_decay"), ("learning_rate", "lr"), ("LR", "lr"), ("maximise", "maximize"),
    ("min_quantised_numel", "min_quantized_numel"), ("states", "state"), ("mater", "master"),
])  # fmt: skip
def test_misspelt_options_are_named(rule, key, meant):
    text = f"no option {key!r}; {meant} was probably meant"
    params = parameters()
    with pytest.raises(ValueError, match=text):
        MAKE[rule]([{"params": params, key: 0.1}])
    with pytest.raises(TypeError, match=key.replace("-", "")) if "-" not in key else pytest.raises(TypeError):
        MAKE[rule](params, **{key: 0.1})
    optimizer = MAKE[rule](params)
    optimizer.param_groups[0][key] = 0.1
    give_gradients(params, 0)
    before = all_of(optimizer, params)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert whole(optimizer, params, before)


def test_options_of_a_programs_own_and_of_schedulers_are_left_alone():
    own = {"name": "body", "layer": 3, "lr_scale": 0.5, "lr_mult": 1, "stage": "late", "decay": True, "initial_lr": 1.0,
           "swa_lr": 0.1, "max_lr": 1, "min_lr": 0, "max_momentum": 0.9, "base_momentum": 0.8, "layer_decay": 0.7, 7: 8}  # fmt: skip
    for make in MAKE.values():
        params = parameters()
        optimizer = make([{"params": params, **own}])
        run(optimizer, params, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        assert own.items() <= optimizer.param_groups[0].items()


@every_rule
def test_an_option_that_is_gone_is_missed(rule):
    params = parameters()
    optimizer = MAKE[rule](params)
    for key in set(optimizer.defaults) - {"foreach", "fused", "capturable", "differentiable"}:
        value = optimizer.param_groups[0].pop(key)
        give_gradients(params, 0)
        with pytest.raises(ValueError, match=f"has no {key}; put it back"):
            optimizer.step()
        optimizer.param_groups[0][key] = value
    optimizer.step()


# ---- what a step works on


def two_groups(**options):
    params = parameters([(300,), (8, 8)])
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], **options)
    return optimizer, params


def halve(p):
    p.grad = None
    p.data = p.data.half()
    p.grad = torch.zeros_like(p)


def reshape(p):
    p.grad = None
    p.data = p.data[:1].clone()
    p.grad = torch.zeros_like(p)


def turn(p):
    p.data = p.data.t().contiguous().t()


def keep_one_row(p):
    grad = p.grad[:1].clone()
    p.grad = None
    data, p.data = p.data, p.data[:1]
    p.grad = grad
    p.data = data


CHANGES = {
    "dtype": (lambda o, p: halve(p), "begun for shape .8, 8., strides .8, 1., torch.float32, .* is now .*, torch.float16, cpu"),
    "shape": (lambda o, p: reshape(p), r"begun for shape \(8, 8\), .* and is now shape \(1, 8\)"),
    "layout": (lambda o, p: turn(p), r"begun for shape \(8, 8\), strides \(8, 1\), .* is now shape \(8, 8\), strides \(1, 8\)"),
    "gaps": (lambda o, p: setattr(p, "data", torch.ones(8, 16)[:, ::2]), "has gaps in memory"),
    "format": (lambda o, p: o.param_groups[1].update(state="int4_rank1", min_quantized_numel=0), "states in int4_rank1"),
    "small ones": (lambda o, p: o.param_groups[1].update(min_quantized_numel=65), "states in float32"),
    "masters": (lambda o, p: o.param_groups[1].update(master="split"), "master weights split"),
    "a gradient of another shape": (lambda o, p: keep_one_row(p), r"has a gradient of shape \(1, 8\)"),
    "a sparse gradient": (lambda o, p: setattr(p, "grad", p.grad.to_sparse()), "sparse gradient"),
    "a state of another size": (lambda o, p: o.state[p].update(exp_avg=torch.zeros(1, 8)), "other tensors than it had"),
    "a state of another dtype": (lambda o, p: o.state[p].update(exp_avg=torch.zeros(8, 8)), "other tensors than it had"),
    "a state that is gone": (lambda o, p: o.state[p].pop("exp_avg"), "other tensors than it had"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_the_first_step_is_refused_whole(change):
    optimizer, params = two_groups(state="int4", min_quantized_numel=0)
    run(optimizer, params, 2)
    give_gradients(params, 2)
    make_it, text = CHANGES[change]
    make_it(optimizer, params[1])
    before = all_of(optimizer, params)
    with pytest.raises(ValueError, match=r"AdamW: parameter 0 of shape \((8|1), 8\) (.|\n)*" + text):
        optimizer.step()
    assert whole(optimizer, params, before)


TURNED = torch.zeros(32, 48).t()
PUT = [
    ("exp_avg", TURNED), ("exp_avg", torch.zeros(48, 32, dtype=torch.int32)), ("exp_avg", torch.zeros(1536)),
    ("exp_avg", torch.zeros(48, 32, dtype=torch.complex64)), ("exp_avg", torch.zeros(1, 32).expand(48, 32)),
    ("exp_avg", torch.zeros(48, 32, dtype=torch.float16)), ("step", torch.tensor(3)), ("step", torch.tensor(3.0).double()),
    ("step", torch.zeros(2)), ("step", torch.zeros(0)), ("master", TURNED),
    ("master", torch.zeros(48, 32, dtype=torch.int32)), ("master", torch.zeros(1536)),
]  # fmt: skip


@pytest.mark.parametrize("name, value", PUT)
def test_states_that_a_program_puts_there_are_what_a_step_reads_or_refused(name, value):
    params = parameters([(48, 32)], torch.bfloat16)
    optimizer = optim.AdamW(params, master="float32")
    run(optimizer, params, 1)
    optimizer.state[params[0]][name] = value
    give_gradients(params, 1)
    before = all_of(optimizer, params)
    with pytest.raises(ValueError, match="exp_avg|count of steps|master weights"):
        optimizer.step()
    assert whole(optimizer, params, before)


def test_int4_and_its_rank1_scales_of_one_size_are_told_apart():
    params = parameters([(256, 256)])
    optimizer = optim.AdamW(params, state="int4")
    run(optimizer, params, 1)
    optimizer.param_groups[0]["state"] = "int4_rank1"
    give_gradients(params, 1)
    with pytest.raises(ValueError, match="states in int4, .* states in int4_rank1"):
        optimizer.step()


def test_a_state_that_a_program_makes_is_one_of_tensors():
    params = parameters([(32,)])
    optimizer = optim.AdamW(params)
    optimizer.state[params[0]] = {"step": 3, "exp_avg": torch.zeros(32), "exp_avg_sq": torch.zeros(32)}
    give_gradients(params, 0)
    with pytest.raises(ValueError, match="states that are no tensors: step; make them"):
        optimizer.step()
    optimizer.state[params[0]]["step"] = torch.tensor(3.0)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


def test_a_group_without_gradients_is_checked_too():
    optimizer, params = two_groups()
    optimizer.param_groups[1]["lr"] = "0.1"
    give_gradients(params[:1], 0)
    before = all_of(optimizer, params)
    with pytest.raises(ValueError, match="group 1: lr is '0.1'"):
        optimizer.step()
    assert whole(optimizer, params, before)


def test_a_state_that_was_cleared_begins_anew():
    optimizer, params = two_groups()
    run(optimizer, params, 2)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.update(state="int8", min_quantized_numel=0)
    run(optimizer, params, 1, 2)
    assert all(optimizer.state[p]["step"] == 1 and optimizer.state[p]["exp_avg"].dtype == torch.uint8 for p in params)


def test_a_step_that_fails_begins_no_state():
    params = parameters([(300,), (256, 256)])
    optimizer = optim.AdamW(params)
    optimizer.param_groups[0]["state"] = "int4_rank1"
    set_part(params[1], Part(0, 1 << 20))  # of which the operator keeps no such states
    give_gradients(params, 0)
    with pytest.raises(ValueError, match="scales for whole rows"):
        optimizer.step()
    assert not optimizer.state.get(params[0]) and not optimizer.state.get(params[1])


@every_rule
def test_parameters_that_cannot_be_stepped_are_refused_at_once(rule):
    twice = parameters([(8,), (4,)])
    for params, text in (
        ([twice[0], twice[1], twice[0]], r"parameter 2 of shape \(8,\) is in the group already; give each parameter once"),
        ([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))], "parameter 0 of shape .3,. is torch.complex64"),
        ([torch.nn.Parameter(torch.zeros(3).double())], "is torch.float64"),
        ([torch.zeros(3, dtype=torch.int8)], "is torch.int8"),
        ([], "empty parameter list"),
    ):
        with pytest.raises(ValueError, match=text):
            MAKE[rule](params)
        optimizer = MAKE[rule](parameters())
        if params:
            with pytest.raises(ValueError, match=text):
                optimizer.add_param_group({"params": params})
            assert len(optimizer.param_groups) == 1
    optimizer = MAKE[rule](twice)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": twice[:1]})


@every_rule
def test_gradients_that_come_later_and_parameters_without_elements(rule):
    params, alone = parameters([(300,), (20,), (0,)]), parameters([(300,), (20,), (0,)])
    optimizer = MAKE[rule](params)
    expected = [MAKE[rule]([p]) for p in alone]
    for step in range(4):
        for of in (params, alone):
            give_gradients(of, step)
            of[1].grad = of[1].grad if step > 1 else None
        optimizer.step()
        for one in expected:
            one.step()
    assert same(params, alone)
    fresh = MAKE[rule](parameters([(300,), (20,), (0,)]))
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state[fresh.param_groups[0]["params"][1]]["step"] == 2


def test_gradient_release_refuses_the_same():
    params = parameters([(300,)])
    optimizer = optim.AdamW(params)
    with optim.GradientRelease(optimizer):
        (params[0] * 2).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.9,)
        before = params[0].detach().clone()
        with pytest.raises(ValueError, match="betas are"):
            (params[0] * 2).sum().backward()
        assert torch.equal(params[0], before)
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        optimizer.zero_grad()
        (params[0] * 2).sum().backward()  # no pass too many
        optimizer.step()
    expected = parameters([(300,)])
    run_ones(optim.AdamW(expected), expected, 2)
    assert same(params, expected)


def run_ones(optimizer, params, steps):
    for _ in range(steps):
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        optimizer.step()
