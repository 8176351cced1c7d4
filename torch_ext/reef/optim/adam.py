"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class Adam(Optimizer):
    """Kingma and Ba 2015, with weight decay added to the gradient (or AdamW's, ``decoupled_weight_decay``); ``amsgrad`` by
    Reddi et al. 2018."""

    _rule = "adam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state: str = "float32",
        master: str = "none",
        min_quantized_numel: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize,
            "foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused,
            "decoupled_weight_decay": self._decoupled or decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)


class AdamW(Adam):
    """Loshchilov and Hutter 2019: Adam, with the parameter decayed."""

    _decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state: str = "float32",
        master: str = "none",
        min_quantized_numel: int = 4096,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused, state=state, master=master,
            min_quantized_numel=min_quantized_numel,
        )  # fmt: skip


class AdamW8bit(AdamW):
    """``AdamW(state="int8")``."""

    def __init__(self, params: ParamsT, *args: Any, state: str = "int8", **options: Any) -> None:
        super().__init__(params, *args, state=state, **options)


class AdamW4bit(AdamW):
    """``AdamW(state="int4")``."""

    def __init__(self, params: ParamsT, *args: Any, state: str = "int4", **options: Any) -> None:
        super().__init__(params, *args, state=state, **options)
