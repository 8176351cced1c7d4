"""Stochastic gradient descent."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum and Nesterov's."""

    _rule = "sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state: str = "float32",
        master: str = "none",
        min_quantized_numel: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)
