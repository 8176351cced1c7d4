"""1-bit Adam."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class OneBitAdam(Optimizer):
    """Tang et al. 2021 (2102.02888), with the parameter decayed. For ``parameters()`` of a shard with
    ``compression=reef.Compression("one_bit_adam", warmup_steps=...)`` and the same beta1.

    In the warm-up it is AdamW. Then ``.grad`` is the momentum m, the second moment v stays as it is, and
    w = (1 - lr weight_decay) w - lr m / (sqrt(v) + eps), without corrections. An element whose v is 0 then has one of
    infinity: m steps it no more. States are float32. Raises ValueError for other parameters, as other optimizers do for
    these."""

    _rule = "one_bit_adam"
    _decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False, "maximize": maximize}
        super().__init__(params, defaults, state="float32", master="none", min_quantized_numel=0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in self.param_groups:  # Shard.refresh may have given it new parts, whose exchange must know it
            self._check_group(group)
        super().load_state_dict(state_dict)
