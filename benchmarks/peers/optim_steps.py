"""What a step of AdamW takes by Reef, torch and the peers that are installed (DeepSpeed, bitsandbytes, torchao), in turn
within one run: each in a process of its own, one step at a time. Also what a process holds more while it steps. JSON
lines as in benchmarks/harness.h.

`optim_steps.py --step NAME LAYOUT` is one of those processes: it steps once for each line it reads."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

ROUNDS = 9
FIRST = "torch fused"


def of_torch():
    import torch

    return torch.optim.AdamW, {"fused": True}


def of_reef(state):
    def optimizer():
        from reef import optim

        return optim.AdamW, {"state": state}

    return optimizer


def of_deepspeed():
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam, {"adamw_mode": True, "fp32_optimizer_states": True}


def of_bitsandbytes():
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit, {}


def of_torchao(name):
    def optimizer():
        import torchao.optim

        return getattr(torchao.optim, name), {}

    return optimizer


# Name: the module it needs, whether its parameters are bfloat16, and what gives its class and options.
OPTIMIZERS = {
    FIRST: ("torch", False, of_torch),
    "reef float32": ("reef", False, of_reef("float32")),
    "reef int8": ("reef", False, of_reef("int8")),
    "reef int4": ("reef", False, of_reef("int4")),
    "reef companded8": ("reef", False, of_reef("companded8")),
    "reef float32, bfloat16 parameters": ("reef", True, of_reef("float32")),
    "DeepSpeedCPUAdam": ("deepspeed", False, of_deepspeed),
    "DeepSpeedCPUAdam, bfloat16 parameters": ("deepspeed", True, of_deepspeed),
    "bitsandbytes AdamW8bit": ("bitsandbytes", False, of_bitsandbytes),
    "torchao AdamW8bit": ("torchao", False, of_torchao("AdamW8bit")),
    "torchao AdamW4bit": ("torchao", False, of_torchao("AdamW4bit")),
}


def shapes_of(layout):
    if layout == "one tensor":
        return [(48 << 20,)]  # whole blocks: torchao keeps tensors of other sizes in 32 bits
    d = 448  # GPT-2's 12 layers, 148 tensors, of a width that comes near 52 million
    layer = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50304, d), (1024, d), *layer * 12, (d,), (d,)]


def held(key):
    """Bytes: VmRSS, now; VmHWM, at most since the last reset."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def step_when_told(name, layout):
    answers = os.fdopen(os.dup(1), "w")  # libraries print, too
    os.dup2(2, 1)
    import torch

    _, is_bf16, optimizer = OPTIMIZERS[name]
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    torch.manual_seed(0)
    params = []
    for shape in shapes_of(layout):
        params.append(torch.nn.Parameter((torch.randn(shape) * 0.02).to(dtype)))
        params[-1].grad = (torch.randn(shape) * 1e-3).to(dtype)
    cls, options = optimizer()
    stepped = cls(params, lr=1e-4, weight_decay=0.01, **options)
    for _ in range(3):
        stepped.step()
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = held("VmRSS")
    elements = sum(p.numel() for p in params)
    print(json.dumps({"elements": elements}), file=answers, flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        stepped.step()
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "more": held("VmHWM") - before}), file=answers, flush=True)


def answer_of(process):
    line = process.stdout.readline()
    return json.loads(line) if line else None


def compare(layout):
    running = {}
    for name, (module, _, _) in OPTIMIZERS.items():
        if importlib.util.find_spec(module) is None:
            continue
        command = [sys.executable, __file__, "--step", name, layout]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        facts = answer_of(process)  # ready: none starts while another does
        if facts is None:
            print(f"{name} did not start", file=sys.stderr)
        else:
            running[name] = (process, facts["elements"])
    nanoseconds = {name: [] for name in running}
    more = {}
    for _ in range(ROUNDS):
        for name, (process, elements) in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            step = answer_of(process)
            nanoseconds[name].append(step["seconds"] / elements * 1e9)
            more[name] = step["more"]
    for name, (process, elements) in running.items():
        process.stdin.close()
        process.wait()
        times = statistics.median(a / b for a, b in zip(nanoseconds[name], nanoseconds[FIRST], strict=True))
        context = (
            f"median of {ROUNDS} rounds in turn; {times:.3g} times {FIRST}; "
            f"{more[name] / 2**20:.1f} MiB more held while stepping"
        )
        row = {"name": f"{layout}/{name}", "value": statistics.median(nanoseconds[name]), "unit": "ns a parameter"}
        print(json.dumps({**row, "context": context}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step_when_told(*sys.argv[2:])
    else:
        for layout in ("one tensor", "GPT-2's 148 tensors"):
            compare(layout)
