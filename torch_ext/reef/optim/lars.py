"""LARS."""

from __future__ import annotations

import torch
import torch.distributed
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class LARS(Optimizer):
    """You et al. 2017: momentum over gradients that are scaled for each tensor by the ratio of norms; tensors of
    fewer than two dimensions are not scaled.

    For parts of parameters (``Shard.parameters()``) give the ``group`` that they are divided among: norms are added up over
    its ranks, so that a step is, bit for bit, that of the whole parameters. All ranks make and step it alike."""

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
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "trust_coefficient": trust_coefficient, "eps": eps, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)
        self._norms = None if group is None else torch.classes.reef.NormSums(group.boxed())
