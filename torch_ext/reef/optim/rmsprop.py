"""RMSprop."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class RMSprop(Optimizer):
    """Hinton 2012; ``centered`` by Graves 2013."""

    _rule = "rmsprop"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        state: str = "float32",
        master: str = "none",
        min_quantized_numel: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "alpha": alpha, "eps": eps, "centered": centered,
            "weight_decay": weight_decay, "capturable": capturable, "foreach": foreach, "maximize": maximize,
            "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)
