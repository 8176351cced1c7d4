"""A byte-level GPT, what it is worth on a text, and what it writes."""

from __future__ import annotations

import argparse
import math

import reef
import torch
import torch.nn.functional as F
from bytelm_corpus import windows_at
from torch import nn


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). A row is one byte of one window: [batch * length, width] to the
    same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attention(self, x: torch.Tensor, length: int) -> torch.Tensor:
        width = x.size(1)
        # [batch * length, 3 * width] -> three of [batch, heads, length, width / heads]
        q, k, v = self.qkv(x).view(-1, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(-1, width))

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), length)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ByteGPT(nn.Module):
    """A GPT whose tokens are the 256 bytes. The head is the byte embedding once more (tied)."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.bytes = nn.Embedding(256, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.depth))
        self.norm = nn.LayerNorm(options.width)
        self.context = options.context
        self.recomputed: reef.PlannedChain | None = None
        self.recomputation = ""
        self.initialize(options.depth)

    def recompute_within(self, size: int, group) -> None:
        """From now on a step's forward and backward pass through the blocks need no more than `size` bytes, gradients
        included; ranks of the group do so alike."""
        # Stages that had `self` would keep it alive for good.
        stages = [lambda x, b=block, length=self.context: b(x, length) for block in self.blocks]
        self.recomputed = reef.PlannedChain(stages, group=group)
        self.recompute_bytes = size

    @torch.no_grad()
    def initialize(self, depth: int) -> None:
        # As in GPT-2: small weights, so that all bytes are equally likely at first (8 bits per byte), and smaller
        # ones where a block adds to the stream, so that its size does not grow with the depth.
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            else:
                adds_to_stream = name.endswith(("projection.weight", "down.weight"))
                parameter.normal_(0.0, 0.02 / math.sqrt(2.0 * depth) if adds_to_stream else 0.02)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Bytes [batch, length] (int64) to logits of the byte after each: [batch * length, 256]."""
        x = self.through_blocks(embedded(self.bytes, self.positions, data), data.size(1))
        return logits_of(self.norm, self.bytes, x)

    def through_blocks(self, x: torch.Tensor, length: int) -> torch.Tensor:
        if self.recomputed and torch.is_grad_enabled():
            self.recomputation = self.recomputation or str(self.recomputed.plan(x, self.recompute_bytes))
            return self.recomputed(x, self.recompute_bytes)
        for block in self.blocks:
            x = block(x, length)
        return x


def embedded(byte_embedding: nn.Embedding, positions: nn.Embedding, data: torch.Tensor) -> torch.Tensor:
    """What a ByteGPT begins with: bytes [batch, length] to a row for each."""
    return (byte_embedding(data) + positions(torch.arange(data.size(1), device=data.device))).flatten(0, 1)


def logits_of(norm: nn.LayerNorm, byte_embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    """And what it ends with."""
    return F.linear(norm(x), byte_embedding.weight)


def next_byte_loss(model: ByteGPT, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats per byte, of each byte of `windows` ([batch, length + 1]) given those before it."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits, windows[:, 1:].flatten())


def validation_offsets(text: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """Where 128 windows spread evenly over `text` begin."""
    count = 128
    return torch.arange(count) * (text.numel() - options.context - 1) // (count - 1)


@torch.no_grad()
def bits_per_byte(model: ByteGPT, text: torch.Tensor, options: argparse.Namespace, device: torch.device) -> float:
    offsets = validation_offsets(text, options)
    nats = 0.0
    for some in offsets.split(options.batch):
        nats += next_byte_loss(model, windows_at(text, some, options.context + 1).to(device)).item() * len(some)
    return nats / len(offsets) / math.log(2)


class Sampler:
    """Draws bytes one after the other, beginning on a new line."""

    temperature = 0.8  # below 1: likelier bytes more often, so that a short training reads well

    def __init__(self, options: argparse.Namespace):
        self.context = options.context
        self.generator = torch.Generator().manual_seed(options.seed)
        self.data = torch.full((1, 1), ord("\n"))

    def seen(self) -> torch.Tensor:
        """What the model is to see next: [1, length]."""
        return self.data[:, -self.context :]

    def next(self, logits: torch.Tensor) -> int:
        """Draws the byte after that; `logits` has a row for each byte that was seen."""
        drawn = torch.multinomial(torch.softmax(logits[-1:].cpu() / self.temperature, -1), 1, generator=self.generator)
        self.data = torch.cat([self.data, drawn], 1)
        return int(drawn)


@torch.no_grad()
def sample(model: ByteGPT, options: argparse.Namespace, device: torch.device) -> bytes:
    """`options.sample` bytes drawn from the model."""
    sampler = Sampler(options)
    return bytes(sampler.next(model(sampler.seen().to(device))) for _ in range(options.sample))


def printable(data: bytes) -> str:
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data)
