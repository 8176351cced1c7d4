"""Scaled losses for gradients of 16 bits, on ranks that see only their parts of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from .collectives import all_reduce


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, but a step in which a gradient is not finite on any rank of ``group`` is left out on all of
    them: at the stages of ``shard`` that divide gradients each rank sees only its part. All ranks call ``unscale_`` and
    ``step`` alike. A step that is left out changes nothing."""

    def __init__(
        self, device: str = "cuda", *args: Any, group: torch.distributed.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__(device, *args, **kwargs)
        self._group = group

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:  # another rank has the loss
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if self._group is None:
            return found
        if not found:  # a rank that has nothing to step
            found = {found_inf.device: found_inf.clone()}
        anywhere = torch.stack([flag.to(found_inf.device) for flag in found.values()]).sum()
        all_reduce([anywhere], self._group)
        for flag in found.values():
            flag.copy_(anywhere.clamp(max=1))
        return found
