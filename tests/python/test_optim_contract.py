"""What programs expect of a torch.optim.Optimizer, and of reef.optim within the other parts of Reef."""

import itertools

import pytest
import torch
from optim_rules import MAKE, ODD, TORCH, every_rule, give_gradients, parameters, run, same, states_of

import reef
from reef import optim

# ---- torch.optim's contract


@pytest.mark.parametrize("rule", TORCH)
def test_torchs_checkpoints_load_and_ours_export(rule):
    theirs, ours, options = TORCH[rule]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        straight = parameters()
        a = theirs(straight, **options)
        run(a, straight, 3)
        moved = parameters()
        b = ours(moved, **{**options, "lr": 9.0})
        for p, q in zip(moved, straight, strict=True):
            p.data.copy_(q.data)
        b.load_state_dict(a.state_dict())
        assert b.param_groups[0]["lr"] == a.param_groups[0]["lr"]
        assert b.param_groups[0]["state"] == "float32"
        run(a, straight, 3, 3)
        run(b, moved, 3, 3)
        assert same(straight, moved)
        back = parameters()
        c = theirs(back, **options)
        for p, q in zip(back, moved, strict=True):
            p.data.copy_(q.data)
        c.load_state_dict(b.torch_state_dict())
        run(b, moved, 3, 6)
        run(c, back, 3, 6)
        assert same(moved, back)
    finally:
        torch.set_num_threads(threads)


def test_a_torch_checkpoint_goes_into_few_bits():
    params = parameters()
    a = torch.optim.AdamW(params)
    run(a, params, 3)
    b = optim.AdamW8bit(parameters(), min_quantized_numel=0)
    b.load_state_dict(a.state_dict())
    for p, q in zip(params, b.param_groups[0]["params"], strict=True):
        code, scale = torch.ops.reef.optim_encode(a.state[p]["exp_avg"], "int8", True)
        assert torch.equal(b.state[q]["exp_avg"], code)
        assert torch.equal(b.state[q]["exp_avg_scale"], scale)
        assert b.state[q]["step"] == 3


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, cycle_momentum=False),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True])
def test_every_scheduler(scheduler, tensor):
    rates, results = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for make in (lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True), lambda p, lr: optim.AdamW(p, lr=lr)):
        params = parameters()
        optimizer = make(params, torch.tensor(1e-2) if tensor else 1e-2)
        schedule = SCHEDULERS[scheduler](optimizer)
        seen = []
        for step in range(8):
            run(optimizer, params, 1, step)
            schedule.step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
        rates.append(seen)
        results.append(params)
    torch.set_num_threads(threads)
    assert rates[0] == rates[1]
    assert same(*results)


@every_rule
def test_grad_scaler_and_a_skipped_step_is_no_step(rule):
    plain, scaled = parameters(), parameters()
    a, b = MAKE[rule](plain), MAKE[rule](scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        give_gradients(plain, step)
        give_gradients(scaled, step)
        scaler.scale(torch.ones(()))
        for p in scaled:
            p.grad.mul_(1024.0)
        before = [p.detach().clone() for p in scaled], {k: v.clone() for k, v in states_of(b).items()}
        if step == 2:
            scaled[1].grad[3] = torch.inf
        scaler.step(b)
        if step == 2:
            assert same(scaled, before[0])
            assert all(torch.equal(v, before[1][k]) for k, v in states_of(b).items())
        else:
            a.step()
            assert same(plain, scaled)
        scaler.update(1024.0)


def test_clipping_accumulation_maximize_hooks_and_closures():
    params = parameters()
    optimizer = optim.AdamW(params, maximize=True)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        return loss

    first = closure().item()
    assert optimizer.step(closure).item() == first
    assert closure().item() > first
    assert calls == ["before", "after"]


@every_rule
def test_groups_with_formats_of_their_own(rule):
    params = parameters(ODD)
    groups = [{"params": params[:2]}, {"params": params[2:4], "state": "int8", "min_quantized_numel": 0, "lr": 1e-4}]
    optimizer = MAKE[rule](groups)
    optimizer.add_param_group({"params": params[4:], "state": "int4", "min_quantized_numel": 0})
    run(optimizer, params, 2)
    expected = parameters(ODD)
    for subset, options in [(expected[:2], {}), (expected[2:4], {"state": "int8"}), (expected[4:], {"state": "int4"})]:
        give_gradients(expected, 0)
        alone = MAKE[rule](subset, **options, min_quantized_numel=0)
        if options.get("state") == "int8":
            alone.param_groups[0]["lr"] = 1e-4
        run(alone, expected, 2)
        alone.zero_grad()
    assert same(params, expected)


def test_frozen_unused_and_empty_parameters():
    params = parameters([(8,), (8,), (0,)])
    params[1].requires_grad_(False)
    optimizer = optim.AdamW(params)
    before = params[1].detach().clone()
    optimizer.step()
    assert not optimizer.state
    params[0].grad = torch.ones(8)
    params[2].grad = torch.ones(0)
    optimizer.step()
    assert torch.equal(params[1], before)
    assert list(optimizer.state) == [params[0]]


def test_layouts_other_than_contiguous():
    plain = torch.nn.Conv2d(8, 16, 3)
    laid = torch.nn.Conv2d(8, 16, 3)
    laid.load_state_dict(plain.state_dict())
    laid = laid.to(memory_format=torch.channels_last)
    for net in (plain, laid):
        optimizer = optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.full((2, 8, 6, 6), 0.1 * (step + 1))).pow(2).sum().backward()
            optimizer.step()
    assert torch.allclose(plain.weight, laid.weight, atol=1e-5)
    assert laid.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_is_not_finite_is_named_and_never_stored():
    for state in optim.STATES:
        named = [(name, p) for name, p in zip(["first", "second"], parameters([(600,), (5000,)]), strict=True)]
        optimizer = optim.AdamW(named, state=state, min_quantized_numel=0)
        params = [p for _, p in named]
        run(optimizer, params, 2)
        give_gradients(params, 2)
        params[1].grad[300] = torch.nan
        params[1].grad[301] = -torch.inf
        before = [p.detach().clone() for p in params]
        with pytest.raises(optim.NonFiniteGradient, match=r"second \(2 elements\)"):
            optimizer.step()
        assert not torch.equal(params[0], before[0])
        assert torch.equal(params[1][256:512], before[1][256:512])
        assert not torch.equal(params[1][512:], before[1][512:])
        for value in optimizer.torch_state_dict()["state"][1].values():
            assert torch.isfinite(value).all()
        run(optimizer, params, 1, 3)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda p: optim.AdamW(p, lr=-1), ValueError, "lr is -1"),
        (lambda p: optim.AdamW(p, betas=(1.0, 0.9)), ValueError, "betas are"),
        (lambda p: optim.AdamW(p, state="int3"), ValueError, "'int3'; use one of float32"),
        (lambda p: optim.AdamW(p, master="gold"), ValueError, "'gold'; use one of none"),
        (lambda p: optim.AdamW(p, capturable=True), ValueError, "capturable=True"),
        (lambda p: optim.SGD(p, nesterov=True), ValueError, "nesterov needs a momentum"),
        (lambda p: optim.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]), ValueError, "float64"),
        (lambda p: optim.AdamW([]), ValueError, "empty parameter list"),
    ],
)
def test_bad_options_are_refused_at_construction(make, error, text):
    with pytest.raises(error, match=text):
        make(parameters())


def test_sparse_gradients_are_refused_by_name():
    table = torch.nn.Embedding(8, 4, sparse=True)
    optimizer = optim.AdamW(table.named_parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="weight has a sparse gradient"):
        optimizer.step()


def test_states_of_another_size_are_refused():
    params = parameters([(300,)])
    optimizer = optim.AdamW(params)
    run(optimizer, params, 1)
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(299)
    give_gradients(params, 1)
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match="state exp_avg of 1196"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_a_refused_call_changes_nothing():
    params = parameters([(300,), (300,)])
    optimizer = optim.AdamW(params)
    run(optimizer, params, 1)
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(299)  # the second of the call
    give_gradients(params, 1)
    before = [p.detach().clone() for p in params], {k: v.clone() for k, v in states_of(optimizer).items()}
    with pytest.raises(ValueError, match="parameter 1 of 300 elements"):
        optimizer.step()
    assert same(params, before[0])
    assert all(torch.equal(v, before[1][k]) for k, v in states_of(optimizer).items())


# ---- the operator, and other parts of Reef


@pytest.mark.parametrize("state", optim.STATES)
def test_the_operators_are_sound(state):
    ops = torch.ops.reef
    p, g = torch.randn(48, 100), torch.randn(48, 100)
    states = [t for signed in (True, False) for t in ops.optim_state(p, state, signed)]
    numbers = [1e-3, 0.9, 0.999, 1e-8, 0.01, 0, 0, 0, 1, 0, 0, 0, 0]
    step = ("adam", state, "none", [p], [g], states, [], [torch.zeros(())], numbers)
    codes, scales = ops.optim_state(p, state, False)
    torch.library.opcheck(ops.optim_step_.default, step)
    torch.library.opcheck(ops.optim_state.default, (p, state, False))
    torch.library.opcheck(ops.optim_encode.default, (p * p, state, False))
    torch.library.opcheck(ops.optim_encode.out, (p * p, state, False), {"codes": codes, "scales": scales})
    torch.library.opcheck(ops.optim_decode.default, (codes, scales, p, state, False))
    torch.library.opcheck(ops.optim_decode.out, (codes, scales, state, False), {"out": torch.empty_like(p)})


def test_encoding_into_what_is_given_refuses_what_does_not_fit():
    values = torch.randn(300)
    codes, scales = torch.ops.reef.optim_state(torch.randn(301), "int8", True)
    with pytest.raises(ValueError, match="of 300 elements has a state to encode of 301"):
        torch.ops.reef.optim_encode.out(values, "int8", True, codes=codes, scales=scales)
    with pytest.raises(ValueError, match="float32"):
        torch.ops.reef.optim_decode.out(codes, scales, "int8", True, out=torch.empty(301, dtype=torch.double))


def test_a_step_in_a_compiled_graph():
    def step(p, g, codes, scales, count):
        numbers = [1e-3, 0.9, 0.999, 1e-8, 0.01, 0, 0, 0, 1, 0, 0, 0, 0]
        torch.ops.reef.optim_step_("adam", "int8", "none", [p], [g * 2], [*codes, *scales], [], [count], numbers)
        return p * 1

    made = [torch.ops.reef.optim_state(torch.empty(300), "int8", signed) for signed in (True, False)]
    found = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        p, g, count = torch.randn(300), torch.randn(300), torch.zeros(())
        states = [t.clone() for pair in made for t in pair]
        out = [run(p, g, states[:2], states[2:], count) for _ in range(3)][-1]
        found.append([out, p, count, *states])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_a_compiled_step_is_the_step(state):
    def train(compiled):
        params = parameters([(300,), (7, 11)])
        optimizer = optim.AdamW(params, state=state, min_quantized_numel=0)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for _ in range(3):
            give_gradients(params, 1)
            step()
        return [p.detach() for p in params]

    assert same(train(True), train(False))


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_within_a_budget_bit_for_bit(state):
    def train(limit=None):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
        optimizer = optim.AdamW(net.parameters(), state=state)

        def steps():
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(16, 128)).pow(2).mean().backward()
                optimizer.step()

        if limit is None:
            steps()
            return list(net.parameters())
        with reef.budget(1 << 40, net, optimizer) as budget:
            budget.set_bytes(budget.use().live_bytes + limit)
            steps()
            assert budget.use().evictions > 0
        return list(net.parameters())

    # A step over all parameters at once would need their gradients and states too.
    elements = 8 * 128 * 129
    assert same(train(), train(elements * 2))


def test_all_combinations_construct():
    for state, master in itertools.product(optim.STATES, optim.MASTERS):
        for make in MAKE.values():
            make(parameters(), state=state, master=master)
