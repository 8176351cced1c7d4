"""A module of small parameters of several shapes, and gradients of it that are whole numbers, for programs that look at what an
exchange does to each of them, bit for bit."""

import torch

SHAPES = {"matrix": (40, 13), "vector": (700,), "cube": (3, 7, 11), "number": ()}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {n: torch.randint(-8000, 8000, shape, generator=generator).float() for n, shape in SHAPES.items()}
