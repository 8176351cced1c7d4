"""Tensors that are parts of a larger one, and that optimizers step them as they would have stepped the whole."""

import pytest
import torch
from reef.optim.optimizer import MASTERS, STATES

import reef
from reef import Part, part_of, set_part, whole_shape_of

RULES = {
    "AdamW": lambda p, **how: reef.optim.AdamW(p, lr=1e-2, **how),
    "SGD": lambda p, **how: reef.optim.SGD(p, lr=0.1, momentum=0.9, **how),
    "Lion": lambda p, **how: reef.optim.Lion(p, lr=1e-3, **how),
    "RMSprop": lambda p, **how: reef.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True, **how),
    "Adagrad": lambda p, **how: reef.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.3, **how),
}
ELEMENTS = 5 * 256 + 77
CUTS = [0, 256, 1024, ELEMENTS]


def parts_of(whole: torch.Tensor) -> list[torch.Tensor]:
    parts = [whole[first:last].clone() for first, last in zip(CUTS, CUTS[1:], strict=False)]
    for part, first in zip(parts, CUTS, strict=False):
        set_part(part, Part(first, ELEMENTS))
    return parts


def test_a_part_is_known_by_the_tensor_and_what_is_detached_from_it():
    tensor = torch.zeros(10, requires_grad=True)
    assert part_of(tensor) is None
    set_part(tensor, Part(512, 1000, copy=3))
    assert part_of(tensor) == part_of(tensor.detach()) == part_of(tensor.data) == (512, 1000, 3)
    assert part_of(tensor + 1) is None and part_of(tensor.detach().clone()) is None
    for bad in (Part(-1, 1000), Part(991, 1000)):
        with pytest.raises(ValueError, match="10 elements from .* on do not lie in 1000"):
            set_part(tensor, bad)
    with pytest.raises(ValueError, match="copy is -1; count from 0"):
        set_part(tensor, Part(0, 1000, copy=-1))
    assert part_of(tensor) == Part(512, 1000, 3)


def test_a_part_says_the_shape_of_the_whole():
    tensor = torch.zeros(1, 10)
    assert whole_shape_of(tensor) == (1, 10)
    set_part(tensor, Part(256, 1000))
    assert whole_shape_of(tensor) == (1000,)
    set_part(tensor, Part(256, 1000), (20, 50))
    assert whole_shape_of(tensor) == whole_shape_of(tensor.detach()) == torch.Size([20, 50])
    assert whole_shape_of(tensor + 1) == (1, 10)
    scalar = torch.zeros(())
    set_part(scalar, Part(0, 1), ())
    assert whole_shape_of(scalar) == ()
    with pytest.raises(ValueError, match=r"a whole of 1000 elements has the shape \[20, 51\]"):
        set_part(tensor, Part(256, 1000), (20, 51))
    assert whole_shape_of(tensor) == (20, 50)


@pytest.mark.parametrize("state", [s for s in STATES if s != "int4_rank1"])
@pytest.mark.parametrize("rule", RULES)
def test_parts_are_stepped_as_in_the_whole(rule, state):
    for dtype, master in [(torch.float32, "none"), *((torch.bfloat16, master) for master in MASTERS)]:
        for smallest in (0, 1000, ELEMENTS + 1):  # parts are smaller
            torch.manual_seed(3)
            whole = torch.randn(ELEMENTS).to(dtype)
            parts = parts_of(whole)
            how = dict(state=state, master=master, min_quantized_numel=smallest)
            of_whole, of_parts = RULES[rule]([whole], **how), RULES[rule](parts, **how)
            for _ in range(4):
                whole.grad = torch.randn(ELEMENTS).to(dtype)
                for part, grad in zip(parts, parts_of(whole.grad), strict=True):
                    part.grad = grad
                of_whole.step()
                of_parts.step()
            where = f"{rule}, {state}, {dtype}, {master}, {smallest}"
            assert torch.equal(torch.cat(parts), whole), where
            for name, codes in of_whole.state[whole].items():
                if name != "step" and not ("4" in state and codes.dtype == torch.uint8):  # two elements a byte
                    together = torch.cat([of_parts.state[part][name].flatten() for part in parts])
                    if "compensated" not in state or name.endswith("_scale") or codes.dtype != torch.uint8:
                        assert torch.equal(together, codes.flatten()), f"{where}: {name}"


def test_states_in_another_format_are_loaded_into_parts_as_into_the_whole():
    torch.manual_seed(5)
    whole = torch.randn(ELEMENTS)
    parts = parts_of(whole)
    theirs = torch.optim.AdamW([whole])
    whole.grad = torch.randn(ELEMENTS)
    theirs.step()
    in_parts = theirs.state_dict()
    entry = in_parts["state"].pop(0)
    for i, (first, last) in enumerate(zip(CUTS, CUTS[1:], strict=False)):
        in_parts["state"][i] = {k: v if k == "step" else v[first:last] for k, v in entry.items()}
    in_parts["param_groups"][0]["params"] = [0, 1, 2]
    of_parts = reef.optim.AdamW(parts, state="bfloat16", min_quantized_numel=0)
    of_parts.load_state_dict(in_parts)
    of_whole = reef.optim.AdamW([whole], state="bfloat16", min_quantized_numel=0)
    of_whole.load_state_dict(theirs.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(torch.cat([of_parts.state[part][name] for part in parts]), of_whole.state[whole][name])


@pytest.mark.parametrize("make", [reef.optim.LAMB, lambda p: reef.optim.LARS(p, lr=0.1)])
def test_rules_that_need_norms_refuse_parts(make):
    part = torch.ones(300)
    set_part(part, Part(0, 1000))
    part.grad = torch.ones(300)
    optimizer = make([part])
    with pytest.raises(ValueError, match="parameter 0 is a part of one of 1000 elements, whose norm .* needs"):
        optimizer.step()
    assert torch.equal(part, torch.ones(300))


def test_scales_of_rows_and_columns_refuse_parts():
    part = torch.ones(300)
    set_part(part, Part(0, 10000))
    part.grad = torch.ones(300)
    with pytest.raises(ValueError, match="int4_rank1 has scales for whole rows and columns"):
        reef.optim.AdamW([part], state="int4_rank1").step()
