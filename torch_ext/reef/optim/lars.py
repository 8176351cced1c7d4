"""LARS."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class LARS(Optimizer):
    """You et al. 2017: momentum over gradients that are scaled for each tensor by the ratio of norms."""

    _rule = "lars"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-1,
        momentum: float = 0.9,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        *,
        maximize: bool = False,
        state: str = "float32",
        master: str = "none",
        min_quantized_numel: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "trust_coefficient": trust_coefficient, "eps": eps, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)
