"""What a step takes on a CUDA device inside a budget, and with what others offer for the same need (torch's save_on_cpu with
page-locked memory, torch's checkpoint), in turn within one run: a GPT of GPT-2's small size. The natural peak is what the
plain step needs; the peaks beside are measured, too. Without a device: no lines. With --small, whether it runs: sizes of no
interest. JSON lines as in benchmarks/harness.h."""

import json
import os
import statistics
import sys
from typing import NamedTuple

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import reef

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROUNDS = 7
WIDTH, LAYERS, HEADS, BATCH, CONTEXT, VOCABULARY = 768, 12, 12, 16, 1024, 50304
BUDGETS = (0.9, 0.75, 0.5, 0.35)
COPIED_BYTES = 1 << 28
if "--small" in sys.argv[1:]:
    ROUNDS, COPIED_BYTES = 2, 1 << 16
    WIDTH, LAYERS, HEADS, BATCH, CONTEXT, VOCABULARY = 32, 2, 2, 8, 32, 64


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = False

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Program:
    """A model with its optimizer and batch; a new one for each variant, from the same seed."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = GPT().cuda()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), device="cuda")

    def step(self):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.net(self.batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss

    def step_offloaded(self):
        with save_on_cpu(pin_memory=True):
            return self.step()

    def step_checkpointed(self):
        self.net.checkpointed = True
        return self.step()


class Measured(NamedTuple):
    ms: float
    """Of a step, the median."""
    peak_bytes: int
    """Of what is allocated."""
    reserved_bytes: int
    """Of the device, by the allocator, at its most."""
    losses: torch.Tensor

    def beside(self, plain):
        return (f"{self.peak_bytes / plain.peak_bytes:.0%} of the natural peak, {self.reserved_bytes / plain.reserved_bytes:.0%} of "
                f"what was reserved for it; losses {'equal to the bit' if torch.equal(self.losses, plain.losses) else 'differ'}")


def measure(step):
    losses = [step().detach() for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        losses.append(step().detach())
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return Measured(statistics.median(times), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(),
                    torch.stack(losses).cpu())


def row(name, value, unit, context):
    print(json.dumps({"name": f"GPT-2 small, bf16/{name}", "value": value, "unit": unit, "context": context}), flush=True)


def copies():
    """Bytes a second between the device and page-locked memory, both ways at once, each way."""
    here = [torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for number, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                to, source = (here, there) if number == 0 else (there, here)
                to[number].copy_(source[number], non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    end.synchronize()
    return 4 * COPIED_BYTES / begin.elapsed_time(end) * 1e3


def finish_backward_passes():
    """Waits until autograd's thread of the device has let go of the passes before, for a process that ends now.

    In torch 2.15 a pass holds the caller's Python context, which that thread may be the last to drop; while the interpreter
    ends, torch aborts then. The thread takes one pass after another, and the pass here has no context."""
    one = torch.ones((), device="cuda", requires_grad=True)
    torch.autograd.Variable._execution_engine.run_backward(
        (one * 1,), (torch.ones_like(one),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def main():
    torch.use_deterministic_algorithms(True)
    row("page-locked copies, each of both ways at once", copies() / 1e9, "GB/s", "the link that a budget has")
    program = Program()
    plain = measure(program.step)
    del program
    row("plain", plain.ms, "ms", f"natural peak {plain.peak_bytes / 2**20:.0f} MiB, reserved {plain.reserved_bytes / 2**20:.0f} MiB")
    for name, method in (("save_on_cpu, page-locked", "step_offloaded"), ("checkpoint of each block", "step_checkpointed")):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        program = Program()
        found = measure(getattr(program, method))
        del program
        row(name, found.ms / plain.ms, "x plain", found.beside(plain))
    for part in BUDGETS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        program = Program()
        try:
            with reef.budget(int(plain.peak_bytes * part), program.net, program.optimizer, device="cuda") as budget:
                found = measure(program.step)
                use = budget.use()
        except RuntimeError as error:  # a torch.OutOfMemoryError only where an allocation finds that it does not fit
            if "out of memory" not in str(error):
                raise
            row(f"budget of {part:.0%}", 0, "x plain", str(error).splitlines()[0][:300])
            continue
        finally:
            del program
        steps = ROUNDS + 3
        row(f"budget of {part:.0%}", found.ms / plain.ms, "x plain",
            f"{found.beside(plain)}; {use.bytes_out / steps / 2**20:.0f} MiB out and {use.bytes_in / steps / 2**20:.0f} MiB in a step, "
            f"{use.faults / steps:.0f} faults, {use.fetches / steps:.0f} fetches")


if __name__ == "__main__" and torch.cuda.is_available():
    main()
    finish_backward_passes()
