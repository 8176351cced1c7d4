"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from reef.part import part_of, set_part

from .check import format_for
from .optimizer import Optimizer


class Adagrad(Optimizer):
    """Duchi et al. 2011."""

    _rule = "adagrad"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state: str = "float32",
        master: str = "none",
        min_quantized_numel: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "foreach": foreach, "maximize": maximize,
            "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)

    def _begin(self, group: dict[str, Any], p: torch.Tensor, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if group["initial_accumulator_value"] == 0:
            return super()._begin(group, p, is_signed)
        first = torch.full_like(p, group["initial_accumulator_value"], dtype=torch.float32)
        if (part := part_of(p)) is not None:
            set_part(first, part)  # what is rounded by chance is rounded as in the whole
        return torch.ops.reef.optim_encode(first, format_for(group, p), is_signed)
