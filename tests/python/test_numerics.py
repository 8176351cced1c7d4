import pytest
import torch

import reef

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts(dtype):
    tensor = torch.randn(1000).to(dtype)
    assert reef.count_nonfinite(tensor) == 0
    tensor[::100] = float("nan")
    tensor[1] = float("-inf")
    assert reef.count_nonfinite(tensor) == 11
    assert reef.count_nonfinite(tensor.view(10, 100)[:, ::100]) == 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    torch.library.opcheck(torch.ops.reef.count_nonfinite.default, (torch.randn(64).to(dtype),))
