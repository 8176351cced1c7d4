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
        length = data.size(1)
        x = (self.bytes(data) + self.positions(torch.arange(length, device=data.device))).flatten(0, 1)
        return F.linear(self.norm(self.through_blocks(x, length)), self.bytes.weight)

    def through_blocks(self, x: torch.Tensor, length: int) -> torch.Tensor:
        if self.recomputed and torch.is_grad_enabled():
            self.recomputation = self.recomputation or str(self.recomputed.plan(x, self.recompute_bytes))
            return self.recomputed(x, self.recompute_bytes)
        for block in self.blocks:
            x = block(x, length)
        return x


def next_byte_loss(model: ByteGPT, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats per byte, of each byte of `windows` ([batch, length + 1]) given those before it."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits, windows[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: ByteGPT, text: torch.Tensor, options: argparse.Namespace, device: torch.device) -> float:
    """On 128 windows spread evenly over `text`."""
    count, window = 128, options.context + 1
    offsets = torch.arange(count) * (text.numel() - window) // (count - 1)
    nats = 0.0
    for some in offsets.split(options.batch):
        nats += next_byte_loss(model, windows_at(text, some, window).to(device)).item() * len(some)
    return nats / count / math.log(2)


@torch.no_grad()
def sample(model: ByteGPT, options: argparse.Namespace, device: torch.device) -> bytes:
    """`options.sample` bytes drawn from the model, one after the other, beginning on a new line."""
    temperature = 0.8  # below 1: likelier bytes more often, so that a short training reads well
    generator = torch.Generator().manual_seed(options.seed)
    data = torch.full((1, 1), ord("\n"))
    for _ in range(options.sample):
        logits = model(data[:, -options.context :].to(device))[-1:].cpu()
        data = torch.cat([data, torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)], 1)
    return bytes(data[0, 1:].tolist())


def printable(data: bytes) -> str:
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data)
