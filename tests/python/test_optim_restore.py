"""What load_state_dict takes and what it refuses: a table of checkpoints, each of them damaged in one way, for every rule.

A refused load leaves the optimizer as it was, bit for bit, and its text names the parameter, or what it is about.
"""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from optim_rules import MAKE, TORCH, every_rule, every_state, give_gradients, parameters, run, same, states_of

from reef import optim

SIZES = [(64, 96), (17,)]


def saved(make, steps=3):
    params = parameters(SIZES)
    optimizer = make(params)
    run(optimizer, params, steps)
    return copy.deepcopy(optimizer.state_dict())


def is_refused(optimizer, state_dict, text):
    """And leaves everything whole: it steps as one that was never asked."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    run(optimizer, params, 1)
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    states = {key: value.clone() for key, value in states_of(optimizer).items()}
    given = copy.deepcopy(state_dict)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(state_dict)
    assert str(given) == str(state_dict)
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    found = states_of(optimizer)
    assert found.keys() == states.keys() and all(torch.equal(found[key], states[key]) for key in states)
    run(optimizer, params, 1, 1)


def foreign():
    """Of other libraries, and of torch's other classes."""
    quantized = {"step": 1000, **{f"state{i}": torch.zeros(64, 96, dtype=torch.uint8) for i in (1, 2)},
                 "qmap1": torch.zeros(256), "absmax1": torch.zeros(24)}  # fmt: skip
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "params": [0, 1]}
    yield "bitsandbytes", {"state": {0: quantized}, "param_groups": [adam]}
    yield "torchao", {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(96, dtype=torch.uint8),
                                    "exp_avg_sq": torch.zeros(96, dtype=torch.uint8)}}, "param_groups": [adam]}
    yield "lion-pytorch", {"state": {0: {"exp_avg": torch.zeros(64, 96)}},
                           "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "params": [0, 1]}]}
    for name in ("NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD"):
        yield f"torch.optim.{name}", saved(getattr(torch.optim, name))
    yield "torch.optim.Muon", {"state": {0: {"momentum_buffer": torch.zeros(64, 96)}},
                               "param_groups": [{"lr": 0.1, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True,
                                                 "ns_steps": 5, "eps": 1e-7, "params": [0, 1]}]}


FOREIGN = dict(foreign())
STEPS_ALIKE = {"AdamW": {"Adam amsgrad"}, "Adam amsgrad": {"AdamW"}, "SGD": {"SGD Nesterov"}, "SGD Nesterov": {"SGD"}}


@every_rule
@pytest.mark.parametrize("source", FOREIGN)
def test_checkpoints_of_others_are_refused(rule, source):
    about = r"parameter 0 of shape \(64, 96\)|parameter groups that are loaded have"
    is_refused(MAKE[rule](parameters(SIZES)), FOREIGN[source], about)


@every_rule
@every_state
def test_checkpoints_of_other_rules_are_refused(rule, state):
    for other, make in MAKE.items():
        if other != rule and other not in STEPS_ALIKE.get(rule, ()):
            given = saved(lambda p, make=make: make(p, state=state, min_quantized_numel=100))
            is_refused(MAKE[rule](parameters(SIZES)), given, "parameter 0 of|groups that are loaded have")


def test_what_is_missing_and_what_is_unknown_are_named():
    adamw = optim.AdamW(parameters(SIZES), state="int8")
    is_refused(adamw, FOREIGN["bitsandbytes"], r"shape \(64, 96\): the state that is loaded lacks exp_avg, exp_avg_sq, and "
                                               "has state1, state2, qmap1, absmax1, which adam does not keep; load it into")
    is_refused(adamw, saved(lambda p: torch.optim.RMSprop(p, momentum=0.9)), "lacks exp_avg, exp_avg_sq, and has square_avg")
    is_refused(adamw, saved(optim.Lion), "lacks exp_avg_sq")
    is_refused(optim.Lion(parameters(SIZES)), saved(optim.AdamW), "has exp_avg_sq, which lion does not keep")
    is_refused(optim.LAMB(parameters(SIZES)), saved(torch.optim.Adam), "have amsgrad")
    is_refused(optim.Adam(parameters(SIZES)), saved(optim.LAMB), "have no amsgrad")


DAMAGES = {
    "one state missing": (lambda s, name: s.pop(name), "lacks {name}"),
    "broadcast from one row": (lambda s, name: s.update({name: torch.ones(1, 96)}), r"{name} is Float of shape \[1, 96\]"),
    "broadcast from one number": (lambda s, name: s.update({name: torch.ones(())}), r"{name} is Float of shape \[\]"),
    "transposed": (lambda s, name: s.update({name: torch.ones(96, 64)}), r"{name} is Float of shape \[96, 64\]"),
    "flat": (lambda s, name: s.update({name: torch.ones(64 * 96)}), r"{name} is Float of shape \[6144\]"),
    "doubles": (lambda s, name: s.update({name: torch.ones(64, 96).double()}), "{name} is Double"),
    "whole numbers": (lambda s, name: s.update({name: torch.ones(64, 96).int()}), "{name} is Int"),
    "codes": (lambda s, name: s.update({name: torch.ones(3, dtype=torch.uint8)}), "{name} is Byte"),
    "sparse": (lambda s, name: s.update({name: torch.ones(64, 96).to_sparse()}), "{name} is"),
    "text": (lambda s, name: s.update({name: "moment"}), "{name} is no tensor but a str"),
    "a list": (lambda s, name: s.update({name: [1.0, 2.0]}), "{name} is no tensor but a list"),
    "an unknown state": (lambda s, name: s.update(slow_average=torch.ones(64, 96)), "has slow_average"),
    "an unknown scale": (lambda s, name: s.update({name + "_scale": torch.ones(24)}), "{name}_scale"),
    "negative step": (lambda s, name: s.update(step=-1), "step is -1"),
    "step of several": (lambda s, name: s.update(step=torch.ones(2)), r"step is Float of shape \[2\]"),
    "step NaN": (lambda s, name: s.update(step=torch.tensor(float("nan"))), "step is"),
    "step between": (lambda s, name: s.update(step=1.5), "step is 1.5"),
    "step text": (lambda s, name: s.update(step="3"), "step is no tensor but a str"),
    "masters unasked": (lambda s, name: s.update(master=torch.ones(64, 96)), "master weights"),
}  # fmt: skip


@every_rule
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_states_are_refused(rule, damage):
    given = saved(MAKE[rule])
    state = given["state"][0]
    names = [name for name in state if name != "step"]
    break_it, text = DAMAGES[damage]
    if damage == "one state missing" and "momentum_buffer" in names and "SGD" in rule:
        names = []  # torch's SGD says so that no step had a momentum
    if not names and "{name}" in text:
        pytest.skip("no state, or none that may not be missing")
    for name in names or [""]:
        broken = copy.deepcopy(given)
        break_it(broken["state"][0], name)
        is_refused(MAKE[rule](parameters(SIZES)), broken, r"parameter 0 of shape \(64, 96\)(.|\n)*" + text.format(name=name))


@every_rule
def test_a_step_that_is_missing_is_refused(rule):
    given = saved(MAKE[rule])
    del given["state"][0]["step"]
    optimizer = MAKE[rule](parameters(SIZES))
    if "SGD" in rule:  # torch's has none
        optimizer.load_state_dict(given)
    else:
        is_refused(optimizer, given, "lacks step")


@every_rule
@every_state
def test_damaged_codes_and_scales_are_refused(rule, state):
    given = saved(lambda p: MAKE[rule](p, state=state, min_quantized_numel=100))
    for name in [name for name in given["state"][0] if name.endswith("_scale")]:
        codes = name.removesuffix("_scale")
        for change, text in (
            (lambda s, name=name: s.pop(name), f"lacks {name}"),
            (lambda s, name=name: s.update({name: s[name][:-1]}), f"{name} is"),
            (lambda s, name=name: s.update({name: s[name].double()}), f"{name} is Double"),
            (lambda s, codes=codes: s.update({codes: s[codes][:-1]}), f"{codes} is Byte"),
            (lambda s, codes=codes: s.update({codes: torch.ones(64, 96)}), f"{name} is loaded for {codes}, which has no codes"),
        ):
            broken = copy.deepcopy(given)
            change(broken["state"][0])
            is_refused(MAKE[rule](parameters(SIZES)), broken, text)


GROUPS = {
    "a learning rate of text": ({"lr": "0.1"}, "lr is '0.1'"),
    "a negative learning rate": ({"lr": -1.0}, "lr is -1.0"),
    "one beta": ({"betas": (0.9,)}, r"betas are \(0.9,\)"),
    "no format": ({"state": "int3"}, "state is 'int3'"),
    "text for a flag": ({"maximize": "yes"}, "maximize is 'yes'"),
    "misspelt": ({"weight_decy": 0.1}, "no option 'weight_decy'; weight_decay was"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_options_that_are_loaded_are_checked(name):
    options, text = GROUPS[name]
    given = saved(optim.AdamW)
    given["param_groups"][0].update(options)
    is_refused(optim.AdamW(parameters(SIZES)), given, text)


def test_options_that_ask_for_states_that_are_not_there():
    given = saved(torch.optim.Adam)
    given["param_groups"][0]["amsgrad"] = True
    is_refused(optim.Adam(parameters(SIZES)), given, "lacks max_exp_avg_sq")
    given = saved(lambda p: torch.optim.RMSprop(p))
    given["param_groups"][0].update(momentum=0.9, centered=True)
    is_refused(optim.RMSprop(parameters(SIZES)), given, "lacks grad_avg, momentum_buffer")
    given = saved(lambda p: optim.AdamW([q.bfloat16().detach().requires_grad_() for q in p]), 0)
    for master in ("float32", "split"):
        params = parameters(SIZES, torch.bfloat16)
        a = optim.AdamW(params, master=master)
        run(a, params, 1)
        given = copy.deepcopy(a.state_dict())
        is_refused(optim.AdamW(parameters(SIZES)), given, "has master weights")
        del given["state"][0]["master"]
        is_refused(optim.AdamW(parameters(SIZES, torch.bfloat16)), given, "lacks master")


def test_what_is_no_state_dict_of_this_optimizer():
    optimizer = optim.AdamW(parameters(SIZES))
    good = saved(optim.AdamW)
    for given in (torch.nn.Linear(2, 2).state_dict(), {}, [1], {"state": {}}):
        is_refused(optimizer, given, "no optimizer's state_dict")
    for change in ({"param_groups": None}, {"param_groups": [{"lr": 0.1}]}, {"param_groups": [3]}, {"state": [1]},
                   {"state": {0: torch.ones(3)}}, {"state": {0: 7}}):  # fmt: skip
        is_refused(optimizer, {**good, **change}, "no optimizer's state_dict")
    as_text = {str(number): state for number, state in good["state"].items()}  # of JSON
    is_refused(optimizer, {**good, "state": as_text}, r"none of its groups \('0', '1'\)")
    is_refused(optimizer, {**good, "param_groups": good["param_groups"] * 2}, "different number of parameter groups")
    is_refused(optimizer, {**good, "param_groups": [{**good["param_groups"][0], "params": [0]}]}, "group of 1 parameters")
    is_refused(optimizer, {**good, "state": {**good["state"], 7: good["state"][0]}}, r"none of its groups \(7\)")
    is_refused(optim.AdamW(parameters([(96, 64), (17,)])), good, r"exp_avg is Float of shape \[64, 96\]")
    # The last is refused after the first has been read.
    damaged = copy.deepcopy(good)
    del damaged["state"][1]["exp_avg"]
    is_refused(optimizer, damaged, r"parameter 1 of shape \(17,\): the state that is loaded lacks exp_avg;")


class Quantized(torch.Tensor):
    """As other libraries' states are: of the parameter's shape and dtype, and something else inside."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride):
        return Quantized(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].codes)
        raise NotImplementedError(str(func))


def test_tensors_that_are_more_than_their_values_are_refused():
    given = saved(optim.AdamW)
    given["state"][0]["exp_avg"] = Quantized(torch.zeros(64, 96, dtype=torch.uint8))
    optimizer = optim.AdamW(parameters(SIZES))
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(64, 96\): exp_avg is a Quantized"):
        optimizer.load_state_dict(given)
    assert not optimizer.state
    with pytest.raises(ValueError, match="is a Quantized; plain parameters are stepped"):
        optim.AdamW([torch.nn.Parameter(Quantized(torch.zeros(8, dtype=torch.uint8)), requires_grad=False)])


def test_parameters_whose_order_changed_by_their_names():
    named = list(zip("ab", parameters([(8,), (8,)]), strict=True))
    given = copy.deepcopy(optim.AdamW(named).state_dict())
    turned = optim.AdamW(named[::-1])
    with pytest.raises(ValueError, match="has a where the optimizer has b"):
        turned.load_state_dict(given)
    others = [("module." + name, p) for name, p in named]
    optim.AdamW(others).load_state_dict(given)  # another wrapper's names, at the same places


# ---- what must go on loading


@contextlib.contextmanager
def one_thread():
    """torch's threads cut vectors in two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def goes_on(theirs, ours, state_dict, params, step):
    fresh = parameters(SIZES)
    for p, q in zip(fresh, params, strict=True):
        p.data.copy_(q.data)
    optimizer = ours(fresh)
    optimizer.load_state_dict(state_dict)
    with one_thread():
        run(theirs, params, 2, step)
        run(optimizer, fresh, 2, step)
    assert torch.equal(fresh[0], params[0])  # of 6144 elements, which torch computes as vectors
    assert torch.allclose(fresh[1], params[1], rtol=1e-6, atol=1e-7)


NEWER = ("maximize", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
VERSIONS = {
    "step a number": lambda g, s: s.update(step=int(s["step"])) if "step" in s else None,
    "step a float": lambda g, s: s.update(step=float(s["step"])) if "step" in s else None,
    "step of one element": lambda g, s: s.update(step=s["step"].reshape(1)) if "step" in s else None,
    "step of 64 bits": lambda g, s: s.update(step=s["step"].double()) if "step" in s else None,
    "step an integer tensor": lambda g, s: s.update(step=s["step"].long()) if "step" in s else None,
    "options that came later": lambda g, s: [g.pop(key, None) for key in NEWER],
    "a scheduler's options": lambda g, s: g.update(initial_lr=g["lr"], swa_lr=0.1, max_lr=1.0, max_momentum=0.9),
    "a program's options": lambda g, s: g.update(name="body", layer=3, lr_scale=0.5, stage="late"),
    "as it is": lambda g, s: None,
    "capturable": lambda g, s: g.update(capturable=True, foreach=True),
    "betas in a list": lambda g, s: g.update(betas=list(g["betas"])) if "betas" in g else None,
    "lr a tensor": lambda g, s: g.update(lr=torch.tensor(float(g["lr"]), dtype=torch.float64)),
    "no momentum as None": lambda g, s: s.setdefault("momentum_buffer") if "nesterov" in g else None,
}


@pytest.mark.parametrize("rule", TORCH)
@pytest.mark.parametrize("version", VERSIONS)
def test_torchs_checkpoints_of_every_version_load_bit_for_bit(rule, version):
    make, ours, options = TORCH[rule]
    params = parameters(SIZES)
    theirs = make(params, **options)
    with one_thread():
        run(theirs, params, 3)
    given = copy.deepcopy(theirs.state_dict())
    for state in list(given["state"].values()) or [given["state"].setdefault(0, {})]:
        VERSIONS[version](given["param_groups"][0], state)
    own = {key: value for key, value in options.items() if key in NEWER}  # not in a file of before them
    goes_on(theirs, lambda p: ours(p, **own), given, params, 3)


def test_amsgrad_is_as_the_checkpoint_has_it():
    params = parameters(SIZES)
    theirs = torch.optim.Adam(params, fused=True)
    run(theirs, params, 3)
    for make in (optim.Adam, torch.optim.Adam):
        optimizer = make(parameters(SIZES), amsgrad=True)
        optimizer.load_state_dict(theirs.state_dict())
        assert optimizer.param_groups[0]["amsgrad"] is False
    goes_on(theirs, lambda p: optim.Adam(p, amsgrad=True), theirs.state_dict(), params, 3)


@pytest.mark.parametrize("source, into", [("Adam", optim.AdamW), ("AdamW", optim.Adam)])
def test_adam_and_adamw_load_each_other_as_torchs_do(source, into):
    params, others, fresh = (parameters() for _ in range(3))
    with one_thread():
        a = getattr(torch.optim, source)(params, weight_decay=0.1, fused=True)
        run(a, params, 2)
        b = getattr(torch.optim, into.__name__)(others, fused=True)
        c = into(fresh)
        for one, of in ((b, others), (c, fresh)):
            one.load_state_dict(copy.deepcopy(a.state_dict()))
            run(one, of, 2, 2)
    assert same(others, fresh)


def test_states_of_options_that_are_off_are_kept_and_go_back_to_torch():
    params = parameters(SIZES)
    a = torch.optim.Adam(params, amsgrad=True)
    run(a, params, 2)
    a.param_groups[0]["amsgrad"] = False
    b = optim.Adam(parameters(SIZES))
    b.load_state_dict(a.state_dict())
    for i, state in b.torch_state_dict()["state"].items():
        assert torch.equal(state["max_exp_avg_sq"], a.state[params[i]]["max_exp_avg_sq"])
    b.param_groups[0]["amsgrad"] = True
    run(b, b.param_groups[0]["params"], 1)


def test_groups_that_were_added_later_are_loaded():
    def build(params):
        optimizer = optim.AdamW(params[:1], lr=1e-2)
        optimizer.add_param_group({"params": params[1:], "lr": 1e-3, "state": "int8", "min_quantized_numel": 0})
        return optimizer

    straight, fresh = parameters(SIZES), parameters(SIZES)
    a = build(straight)
    run(a, straight, 2)
    early = optim.AdamW(fresh[:1])
    is_refused(early, copy.deepcopy(a.state_dict()), "different number of parameter groups, 2 for 1")
    for p, q in zip(fresh, straight, strict=True):
        p.data.copy_(q.data)
    b = build(fresh)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    run(a, straight, 2, 2)
    run(b, fresh, 2, 2)
    assert same(straight, fresh)


@every_rule
@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies_go_on_alike(rule, copied):
    params = parameters(SIZES)
    a = MAKE[rule](params, state="int8", min_quantized_numel=0)
    run(a, params, 2)
    if copied == "pickle":
        b = pickle.loads(pickle.dumps(a))
    else:
        b = copy.deepcopy(a)
    others = b.param_groups[0]["params"]
    run(a, params, 2, 2)
    run(b, others, 2, 2)
    assert same(params, others)
    b.param_groups[0]["state"] = "int4"
    give_gradients(others, 4)
    with pytest.raises(ValueError, match="states in int8, master weights none, and is now"):
        b.step()
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    a.load_state_dict(torch.load(file, weights_only=True))
