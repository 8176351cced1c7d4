"""Questions about the numbers in a tensor."""

from __future__ import annotations

import torch


def count_nonfinite(tensor: torch.Tensor) -> int:
    """How many elements are NaN or infinite. Reads the tensor once; on CUDA it waits for the current stream."""
    return torch.ops.reef.count_nonfinite(tensor)


@torch.library.register_fake("reef::count_nonfinite")
def _(tensor: torch.Tensor) -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()
