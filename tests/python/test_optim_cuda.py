"""A step on a CUDA device is the step on the CPU, bit for bit: only norms are added up in another order."""

import pytest
import torch
from optim_rules import MAKE, ODD, SIZES, every_rule, every_state, give_gradients, parameters, run, same, states_of

from reef import optim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [(torch.float32, "none")] + [
    (dtype, master) for dtype in (torch.bfloat16, torch.float16) for master in ("none", "float32", "split", "stochastic")
]


def on_device(params):
    return [torch.nn.Parameter(p.detach().cuda()) for p in params]


def give_the_same_gradients(there, here):
    for p, q in zip(there, here, strict=True):
        p.grad = q.grad.cuda()


def run_both(here, there, a, b, steps):
    for step in range(steps):
        give_gradients(here, step)
        give_the_same_gradients(there, here)
        a.step()
        b.step()


def expect_same_bits(here, there, a, b):
    assert same(here, [p.cpu() for p in there])
    expected, found = states_of(a), states_of(b)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(value, found[key].cpu()), key


@every_rule
@every_state
def test_is_the_cpus_step(rule, state):
    here = parameters(SIZES + ODD)
    there = on_device(here)
    options = {"state": state, "min_quantized_numel": 0}
    a, b = MAKE[rule](here, **options), MAKE[rule](there, **options)
    if rule in ("LAMB", "LARS"):  # trust ratios of norms in another order, once, from the same states
        run_both(here, there, a, b, 1)
        for p, q in zip(here, there, strict=True):
            assert torch.allclose(p, q.cpu(), rtol=1e-6, atol=1e-7)
        return
    run_both(here, there, a, b, 5)
    expect_same_bits(here, there, a, b)


@pytest.mark.parametrize(("dtype", "master"), DTYPES)
@every_state
def test_is_the_cpus_step_with_masters(dtype, master, state):
    here = parameters(SIZES + ODD, dtype)
    there = on_device(here)
    options = {"state": state, "master": master, "min_quantized_numel": 0, "lr": 1e-2}
    a, b = optim.AdamW(here, **options), optim.AdamW(there, **options)
    run_both(here, there, a, b, 5)
    expect_same_bits(here, there, a, b)


@every_state
def test_memory_that_is_not_aligned(state):
    here = parameters([(1001,), (4099,)])
    flat = torch.zeros(6000, device="cuda")
    there = []
    for p, first in zip(here, (1, 1503), strict=True):
        view = flat[first : first + p.numel()]
        view.copy_(p.detach())
        there.append(torch.nn.Parameter(view))
    a, b = (optim.AdamW(p, lr=1e-2, state=state, min_quantized_numel=0) for p in (here, there))
    run_both(here, there, a, b, 3)
    expect_same_bits(here, there, a, b)


def test_many_tensors_in_one_step():
    here = parameters([(n,) for n in (1, 255, 256, 4096, 4097, 40000, 7)] * 40)
    there = on_device(here)
    a, b = (optim.AdamW(p, lr=1e-2, state="int8") for p in (here, there))  # small ones keep float32
    run_both(here, there, a, b, 2)
    expect_same_bits(here, there, a, b)


@every_state
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_cpus(state, signed):
    values = torch.randn(10007, generator=torch.Generator().manual_seed(3))
    values = values if signed else values.abs()
    codes, scales = torch.ops.reef.optim_encode(values, state, signed)
    there = torch.ops.reef.optim_encode(values.cuda(), state, signed)
    assert torch.equal(there[0].cpu(), codes)
    assert torch.equal(there[1].cpu(), scales)
    back = torch.ops.reef.optim_decode(*there, values.cuda(), state, signed)
    assert torch.equal(back.cpu(), torch.ops.reef.optim_decode(codes, scales, values, state, signed))


@every_state
def test_gradients_that_are_not_finite_are_reported_by_name(state):
    here = parameters(SIZES)
    there = on_device(here)
    a, b = (optim.AdamW(p, lr=1e-2, state=state, min_quantized_numel=0) for p in (here, there))
    run_both(here, there, a, b, 1)
    give_gradients(here, 1)
    here[0].grad[3, 5] = float("nan")
    here[2].grad[300:303] = float("inf")
    give_the_same_gradients(there, here)
    texts = []
    for optimizer in (a, b):
        with pytest.raises(optim.NonFiniteGradient) as refused:
            optimizer.step()
        texts.append(str(refused.value))
    assert texts[0] == texts[1]
    assert "(3 elements)" in texts[1]
    expect_same_bits(here, there, a, b)


def test_parameters_here_and_there_in_one_optimizer():
    here = parameters(SIZES)
    both = [*on_device(here[:2]), *(torch.nn.Parameter(p.detach().clone()) for p in here[2:])]
    a, b = (optim.AdamW(p, lr=1e-2) for p in (here, both))
    for step in range(3):
        give_gradients(here, step)
        for p, q in zip(both, here, strict=True):
            p.grad = q.grad.to(p.device)
        a.step()
        b.step()
    assert same(here, [p.cpu() for p in both])


@every_state
def test_a_checkpoint_moves_between_devices(state):
    here = parameters(SIZES)
    a = optim.AdamW(here, lr=1e-2, state=state, min_quantized_numel=0)
    run(a, here, 3)
    there = on_device(here)
    b = optim.AdamW(there, lr=1e-2, state=state, min_quantized_numel=0)
    b.load_state_dict(a.state_dict())
    give_gradients(here, 3)
    give_the_same_gradients(there, here)
    a.step()
    b.step()
    expect_same_bits(here, there, a, b)


def test_grad_scaler_skips_a_step_whole():
    there = on_device(parameters(SIZES))
    optimizer = optim.AdamW(there, lr=1e-2, state="int8", min_quantized_numel=0)
    scaler = torch.amp.GradScaler("cuda")
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        before = [p.detach().clone() for p in there]
        loss = sum((p.float() ** 2).sum() for p in there) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert same(before, there) == (step == 1)
    assert optimizer.state[there[0]]["step"].item() == 2


def test_gradient_release():
    here = parameters(SIZES)
    there = on_device(here)
    a, b = (optim.AdamW(p, lr=1e-2, state="int8", min_quantized_numel=0) for p in (here, there))
    release = optim.GradientRelease(b)
    for _ in range(3):
        sum((p**2).sum() for p in there).backward()
        assert all(p.grad is None for p in there)
        b.step()
        for p in here:
            p.grad = 2 * p.detach()
        a.step()
    release.remove()
    expect_same_bits(here, there, a, b)
