"""A ByteGPT that is cut over ranks."""

from __future__ import annotations

import argparse
import math

import reef
import torch
import torch.nn.functional as F
from bytelm_corpus import windows_at
from bytelm_model import Block, ByteGPT, Sampler, embedded, logits_of, validation_offsets
from torch import nn

# What is between stages has a row for each window: [batch, length, width].


class First(nn.Module):
    def __init__(self, model: ByteGPT):
        super().__init__()
        self.bytes, self.positions = model.bytes, model.positions

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return embedded(self.bytes, self.positions, data).unflatten(0, data.shape)


class Middle(nn.Module):
    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x.flatten(0, 1), x.size(1)).view_as(x)


class Last(nn.Module):
    def __init__(self, model: ByteGPT):
        super().__init__()
        self.norm, self.bytes = model.norm, model.bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return logits_of(self.norm, self.bytes, x.flatten(0, 1))


class Pipelined:
    """The embedding, each block and the head are stages. States are those of a whole ByteGPT. All ranks make the same calls."""

    def __init__(self, model: ByteGPT, options: argparse.Namespace, group, windows: torch.Tensor):
        """Takes the stages that this rank has from ``model``. ``windows``: like those of a micro-batch."""
        self.group, self.replicas = group, options.replicas
        self.depth = len(model.blocks)
        stages = [First(model), *map(Middle, model.blocks), Last(model)]
        self.pipeline = reef.Pipeline(
            stages, group, micro_batches=options.pipeline, schedule=options.schedule or "", replicas=options.replicas,
            shard=dict(stage=options.stage), sample=None if options.schedule else windows[:, :-1],
        )  # fmt: skip

    def name_in_model(self, name: str) -> str:
        stage, _, rest = name.partition(".")
        return rest if int(stage) in (0, self.depth + 1) else f"blocks.{int(stage) - 1}.{rest.removeprefix('block.')}"

    def parameters(self) -> list[torch.Tensor]:
        return self.pipeline.parameters()

    def names(self) -> list[str]:
        return [self.name_in_model(name) for name, _ in self.pipeline.named_parameters()]

    def modules(self) -> list[nn.Module]:
        return list(self.pipeline.modules().values())

    def step(self, windows: torch.Tensor) -> torch.Tensor:
        """Runs a step forward and backward. Returns the mean of next_byte_loss over all micro-batches."""

        def loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits, following.flatten())

        return self.pipeline.step(windows[:, :-1], loss, windows[:, 1:])

    def bits_per_byte(self, text: torch.Tensor, options: argparse.Namespace, device: torch.device) -> float:
        offsets = validation_offsets(text, options)
        nats = torch.zeros((), dtype=torch.float64)
        for some in offsets.tensor_split(max(1, len(offsets) // options.batch)):
            windows = windows_at(text, some, options.context + 1).to(device)
            logits = self.pipeline.forward(windows[:, :-1])
            if logits is not None:
                nats += F.cross_entropy(logits, windows[:, 1:].flatten()).item() * len(some)
        return self._told_by_the_last(nats).item() / len(offsets) / math.log(2)

    def sample(self, options: argparse.Namespace, device: torch.device) -> bytes:
        """One micro-batch is the text; the others have nothing to say."""
        sampler = Sampler(options)
        data = torch.zeros(options.sample, dtype=torch.long)

        def following(lane: int, step: int, logits: torch.Tensor) -> torch.Tensor | None:
            if lane > 0:
                return None
            data[step] = sampler.next(logits)
            return sampler.seen().to(device)

        self.pipeline.generate([sampler.seen().to(device)] * options.pipeline, options.sample, following)
        return bytes(self._told_by_the_last(data).tolist())

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        return {self.name_in_model(name): value for name, value in self.pipeline.full_state_dict(rank0_only=rank0_only).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        last = self.depth + 1
        named = {}
        for name, value in state.items():
            if name.startswith("blocks."):
                _, number, rest = name.split(".", 2)
                named[f"{int(number) + 1}.block.{rest}"] = value
            elif name.startswith("norm."):
                named[f"{last}.{name}"] = value
            else:
                named[f"0.{name}"] = value
        named[f"{last}.bytes.weight"] = named["0.bytes.weight"]
        self.pipeline.load_state_dict(named)

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, rank0_only: bool = False) -> dict:
        """As of a whole ByteGPT: its parameters are in this order, too."""
        state = self.pipeline.full_optimizer_state_dict(optimizer, rank0_only=rank0_only)
        for group in state.get("param_groups", []):
            if "param_names" in group:
                group["param_names"] = [self.name_in_model(name) for name in group["param_names"]]
        return state

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: dict) -> None:
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in state["param_groups"]]
        self.pipeline.load_optimizer_state_dict(optimizer, {**state, "param_groups": groups})

    def _told_by_the_last(self, known: torch.Tensor) -> torch.Tensor:
        reef.broadcast([known], self.group, root=self.pipeline.schedule.rank_of[0][-1] * self.replicas)
        return known
