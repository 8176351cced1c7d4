"""Lion."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class Lion(Optimizer):
    """Chen et al. 2023: the sign of an interpolated momentum, with the parameter decayed."""

    _rule = "lion"
    _decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: str = "float32",
        master: str = "none",
        min_quantized_numel: int = 4096,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)
