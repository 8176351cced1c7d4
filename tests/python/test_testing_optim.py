"""The suite of laws: ours keep every one, and each can be broken."""

import pytest
import torch

from reef import optim
from reef.testing.optim import LAWS, check, main


@pytest.mark.parametrize("state", optim.STATES)
@pytest.mark.parametrize("rule", ["AdamW", "Adam", "SGD", "Lion", "RMSprop", "Adagrad", "LAMB", "LARS"])
def test_ours_keep_every_law(rule, state):
    options = {"momentum": 0.9} if rule == "SGD" else {}
    outcomes = check(getattr(optim, rule), state=state, min_quantized_numel=0, **options)
    assert [f"{o.law}: {o.why}" for o in outcomes if not o.kept] == []


def test_torchs_own_are_found_sound():
    broken = {o.law for o in check(torch.optim.AdamW) if not o.kept}
    assert broken == set()


class Careless(torch.optim.Optimizer):
    """Breaks what it can: forgets its momentum when saved, ignores groups, swallows NaN."""

    def __init__(self, params, lr=1e-2, maximize=False):
        super().__init__(params, {"lr": lr})
        self.momentum = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                grad = torch.nan_to_num(p.grad if p.grad is not None else torch.ones_like(p), posinf=0)
                self.momentum[p] = self.momentum.get(p, 0) * 0.9 + grad
                p.sub_(self.momentum[p], alpha=1e-2)


def test_a_careless_optimizer_is_found_out():
    broken = {o.law for o in check(Careless) if not o.kept}
    assert {
        "resumes bit for bit", "schedulers matter", "groups have options of their own",
        "leaves frozen and unused alone", "a closure gives its loss", "maximizes", "nan is not swallowed",
        "bad options are refused at once",
    } <= broken  # fmt: skip


def test_from_the_command_line(capsys):
    assert main(["torch.optim.SGD", "momentum=0.9", "foreach=false"]) == 0
    assert f"{len(LAWS)} of {len(LAWS)} laws kept by torch.optim.SGD" in capsys.readouterr().out
