"""LAMB."""

from __future__ import annotations

import torch
import torch.distributed
from torch.optim.optimizer import ParamsT

from .optimizer import Optimizer


class LAMB(Optimizer):
    """You et al. 2020, algorithm 2: Adam's update, scaled for each tensor by the ratio of norms; tensors of
    fewer than two dimensions are not scaled.

    For parts of parameters (``Shard.parameters()``) give the ``group`` that they are divided among: norms are added up over
    its ranks, so that a step is, bit for bit, that of the whole parameters. All ranks make and step it alike."""

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
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state=state, master=master, min_quantized_numel=min_quantized_numel)
        self._norms = None if group is None else torch.classes.reef.NormSums(group.boxed())
