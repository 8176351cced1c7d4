"""What a step of AdamW takes on a CUDA device by Reef, torch's fused kernel and the peers that are installed (torchao,
bitsandbytes), in turn within one run, beside a plain copy: milliseconds a billion parameters, and which part of the
copy's bandwidth the bytes that must be moved are. Without a device: no lines. With --small, whether it runs: sizes of no
interest. JSON lines as in benchmarks/harness.h."""

import importlib.util
import json
import statistics
import sys

import torch

import reef

ROUNDS = 15
ELEMENTS = 1 << 28
WIDTH, LAYERS, VOCABULARY = 1024, 24, 50304  # GPT-2's medium ones
if "--small" in sys.argv[1:]:
    ROUNDS, ELEMENTS = 2, 1 << 12
    WIDTH, LAYERS, VOCABULARY = 32, 2, 64


# Name: the module it needs, bytes a parameter that a step must read and write, and what makes it.
def reef_adamw(state):
    return lambda params: reef.optim.AdamW(params, lr=1e-4, state=state)


def torchao(name):
    def make(params):
        import torchao.optim

        return getattr(torchao.optim, name)(params, lr=1e-4)

    return make


def bitsandbytes(params):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=1e-4)


OPTIMIZERS = {
    "torch fused": ("torch", 28, lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True)),
    "reef float32": ("reef", 28, reef_adamw("float32")),
    "reef bfloat16": ("reef", 20, reef_adamw("bfloat16")),
    "reef int8": ("reef", 16 + 4 / 64, reef_adamw("int8")),
    "reef int4": ("reef", 14 + 4 / 32, reef_adamw("int4")),
    "reef companded8": ("reef", 16 + 4 / 16, reef_adamw("companded8")),
    "bitsandbytes AdamW8bit": ("bitsandbytes", 16, bitsandbytes),
    "torchao AdamW8bit": ("torchao", 16, torchao("AdamW8bit")),
    "torchao AdamW4bit": ("torchao", 14, torchao("AdamW4bit")),
}


def shapes_of(layout):
    if layout == "one tensor":
        return [(ELEMENTS,)]
    d = WIDTH
    layer = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(VOCABULARY, d), (1024, d), *layer * LAYERS, (d,), (d,)]


def milliseconds(work):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def compare(layout):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = shapes_of(layout)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    copied_from = torch.empty(elements, device="cuda")
    copied_to = torch.empty_like(copied_from)
    works = {"copy": lambda: copied_to.copy_(copied_from)}
    bytes_of = {"copy": 8}
    for name, (module, moved, make) in OPTIMIZERS.items():
        if importlib.util.find_spec(module) is None:
            continue
        params = []
        for shape in shapes:
            params.append(torch.nn.Parameter(torch.randn(shape, device="cuda", generator=generator) * 0.02))
            params[-1].grad = torch.randn(shape, device="cuda", generator=generator) * 1e-3
        works[name] = make(params).step
        bytes_of[name] = moved
    for work in works.values():
        for _ in range(3):
            work()
    times = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(milliseconds(work))
    rate = {name: bytes_of[name] / statistics.median(all) for name, all in times.items()}
    for name, all in times.items():
        row = {
            "name": f"{layout}/{name}",
            "value": statistics.median(all) / elements * 1e9,
            "unit": "ms a billion parameters",
            "context": f"median of {ROUNDS} rounds in turn; {bytes_of[name]:.4g} bytes a parameter at "
            f"{rate[name] / rate['copy']:.0%} of the copy's bandwidth",
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__" and torch.cuda.is_available():
    for layout in ("one tensor", "GPT-2's tensors"):
        compare(layout)
        torch.cuda.empty_cache()
