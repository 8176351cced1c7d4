"""One rank of tests/python/test_pipeline.py: trains and serves a model that needs three times what a rank may have, which the
kernel holds it to (RLIMIT_DATA), with the losses and outputs of one process without a limit."""

import ctypes
import io
import re
import resource
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import reef

WIDTH, LAYERS, STEPS, MICRO_BATCHES = 1536, 48, 3, 4
MODEL_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
NEEDED_BYTES = 4 * MODEL_BYTES  # with gradients, and two states of AdamW


def layer(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1000 + step)
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def trained_alone() -> list[torch.Tensor]:
    """The losses, and then outputs."""
    model = nn.Sequential(*map(layer, range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    made = []
    for step in range(STEPS):
        loss = 0
        for x, y in zip(*(tensor.tensor_split(MICRO_BATCHES) for tensor in data(step)), strict=True):
            own = nn.functional.mse_loss(model(x), y)
            own.backward()
            loss = loss + own.detach()
        for parameter in model.parameters():
            parameter.grad /= MICRO_BATCHES
        optimizer.step()
        optimizer.zero_grad()
        made.append(loss / MICRO_BATCHES)
    with torch.no_grad():
        made.append(torch.cat([model(x) for x in data(STEPS)[0].tensor_split(MICRO_BATCHES)]))
    return made


def main() -> None:
    torch.set_num_threads(1)
    M_MMAP_THRESHOLD = -3  # large tensors go back to the system when they are freed, so none is left over between others
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()
    alone = [sys.executable, __file__, "alone"]  # in a process of its own, whose memory is gone afterwards
    expected = []
    if rank == size - 1:
        expected = torch.load(io.BytesIO(subprocess.run(alone, stdout=subprocess.PIPE, check=True).stdout))
    held = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    limit = held + NEEDED_BYTES // 3
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if rank == 0:
        refused = subprocess.run(alone, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert refused.returncode != 0 and re.search("alloc|[Mm]emory", refused.stderr), refused.stderr
    pipeline = reef.Pipeline([lambda number=number: layer(number) for number in range(LAYERS)], group, micro_batches=MICRO_BATCHES)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(STEPS):
        x, y = data(step)
        losses.append(pipeline.step(x, nn.functional.mse_loss, y))
        optimizer.step()
        optimizer.zero_grad()
    output = pipeline.forward(data(STEPS)[0])
    for own, other in zip(losses, expected, strict=False):
        assert torch.equal(own, other), (own, other)
    if rank == size - 1:
        assert len(expected) == STEPS + 1
        assert torch.equal(output, expected[-1])


if __name__ == "__main__":
    if sys.argv[1:] == ["alone"]:
        torch.set_num_threads(1)
        torch.save(trained_alone(), sys.stdout.buffer)
    else:
        main()
