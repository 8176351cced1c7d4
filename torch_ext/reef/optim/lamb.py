"""LAMB."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class LAMB(Optimizer):
    """You et al. 2020, algorithm 2: Adam's update, scaled for each tensor by the ratio of norms."""

    _rule = "lamb"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: str = "float32",
        master: str = "none",
        min_quantized_numel: int = 4096,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group["weight_decay"]}
