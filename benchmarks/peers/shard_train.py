"""Training on several ranks of this machine over gloo, by torch's wrappers, DeepSpeed (if it is installed) and reef.shard:
tokens a second, bytes on the wire, and what a process holds. A GPT of 40 million parameters, AdamW fused. Ratios are of pairs:
both models live in the same processes, which train one and the other in turn, as two sets of processes differ by more than what
is measured. What a process holds is of fresh ones with one model; the heap is counted in processes of its own
(benchmarks/heap_counter.cpp), from before the model is made."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

LAYERS, WIDTH, VOCABULARY, BATCH, LENGTH = 10, 512, 8192, 2, 128
BLOCKS = {2: 12, 4: 8}
"""Of a pair's steps, by ranks; each of one that is not measured and two that are."""
ROUNDS, STEPS, BUCKET = 3, 5, "12MiB"
DEEPSPEED = ("DeepSpeed ZeRO 2", "DeepSpeed ZeRO 3") if importlib.util.find_spec("deepspeed") else ()
MODES = ("DistributedDataParallel", "ZeroRedundancyOptimizer", "fully_shard", *DEEPSPEED, "reef replicate", "reef optimizer",
         "reef gradients", "reef parameters", "reef parameters, which stay", "reef replicate, native order")  # fmt: skip

ALONE = "computation alone"
"""Of each rank, without a group's work."""


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def sent_bytes() -> int:
    """By this host, over the interface that gloo uses."""
    name = os.environ["GLOO_SOCKET_IFNAME"] + ":"
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith(name)).split(":")[1].split()[8])


def counter_path() -> Path:
    return Path(os.environ.get("REEF_BUILD_DIR", "build")).resolve() / "benchmarks" / "libheap_counter.so"


def make_model():
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.before(x)).view(batch, length, 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.down(nn.functional.gelu(self.up(self.between(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return Gpt()


def set_up(mode: str):
    """The model to call and the optimizer to step."""
    import torch
    import torch.distributed as dist

    settings = dict(lr=1e-4, weight_decay=0.01, fused=True)
    model = make_model()
    if mode.startswith("reef"):
        import reef

        stage, _, option = mode.removeprefix("reef ").partition(", ")
        resident = "1GiB" if option == "which stay" else 0
        sum_order = "native" if option == "native order" else "ranks"
        buckets = {} if stage == "replicate" else {"bucket_bytes": BUCKET}  # else as large as DistributedDataParallel's
        sharded = reef.shard(model, dist.group.WORLD, stage=stage, resident_bytes=resident, sum_order=sum_order, **buckets)
        model.sharded = lambda: sharded  # lives as long
        return model, torch.optim.AdamW(sharded.parameters(), **settings)
    if mode in DEEPSPEED:
        return set_up_deepspeed(model, int(mode[-1]), torch.optim.AdamW(model.parameters(), **settings))
    if mode == ALONE:
        return model, torch.optim.AdamW(model.parameters(), **settings)
    if mode == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters(), **settings)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if mode == "ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **settings)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), **settings)


def set_up_deepspeed(model, stage: int, optimizer):
    import deepspeed

    elements = 3 * 2**20  # a bucket of 12 MiB; its default of half a billion holds the whole model several times
    of_stage = {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if stage == 3:
        of_stage |= {"stage3_prefetch_bucket_size": elements, "stage3_max_live_parameters": 2 * elements,
                     "stage3_param_persistence_threshold": 10_000}  # fmt: skip
    settings = {"train_micro_batch_size_per_gpu": BATCH, "zero_allow_untested_optimizer": True,
                "zero_optimization": of_stage, "steps_per_print": 10**9}  # fmt: skip
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    return engine, engine


def begin_rank() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")


def end_rank(found: dict[str, float]) -> None:
    import torch.distributed as dist

    sys.stdout.write(f"RESULT {json.dumps(found)}\n")  # at once: ranks share the pipe
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # no mode is measured while it is taken down


def run_rank(modes: list[str], blocks: int) -> None:
    begin_rank()
    if len(modes) == 2:
        return end_rank(measure_pair(*map(set_up, modes), blocks))
    (mode,) = modes
    if os.environ.get("LD_PRELOAD", "") != str(counter_path()):
        return end_rank(measure(*set_up(mode)))
    import torch

    if mode.startswith("reef"):
        import reef  # noqa: F401
    torch.ones(4, 4) @ torch.ones(4, 4)
    counter = ctypes.CDLL(None)
    before = counter.heap_live_bytes()
    run = set_up(mode)
    measure(*run)
    counter.heap_take_peak_bytes()
    measure(*run, steps_before=0)
    end_rank({"heap": counter.heap_take_peak_bytes() - before})


def stepping(model, optimizer):
    """A function that trains a step and gives its seconds."""
    import torch

    generator = torch.Generator().manual_seed(100 + int(os.environ["RANK"]))

    def step() -> float:
        begin = time.perf_counter()
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        if model is optimizer:  # DeepSpeed's engine is both
            model.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        loss.item()
        return time.perf_counter() - begin

    return step


def measure_pair(first, second, blocks: int) -> dict[str, float]:
    """Of a step of each, and how many times faster the second is: medians over the blocks of the slowest rank."""
    import torch
    import torch.distributed as dist

    steps = [stepping(*first), stepping(*second)]
    for step in steps:
        step(), step()
    seconds = torch.zeros(blocks, 2, dtype=torch.float64)
    for block in range(blocks):
        for which in (0, 1) if block % 2 == 0 else (1, 0):
            dist.barrier()
            steps[which]()
            seconds[block, which] = (steps[which]() + steps[which]()) / 2
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    low, ratio, high = (seconds[:, 0] / seconds[:, 1]).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"first": seconds[:, 0].median().item(), "seconds": seconds[:, 1].median().item(),
            "ratio": ratio, "low": low, "high": high}  # fmt: skip


def measure(model, optimizer, steps_before: int = 2) -> dict[str, float]:
    """Of a step, after those before it."""
    import torch.distributed as dist

    step = stepping(model, optimizer)
    for _ in range(steps_before):
        step()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = sent_bytes()
    seconds = [step() for _ in range(STEPS)]
    dist.barrier()
    wire = sent_bytes() - before
    return {"seconds": statistics.median(seconds), "wire": wire / STEPS, "peak": status("VmHWM")}


def run_mode(mode: str, ranks: int, own_network: bool, preloaded: str = "", program: str = __file__) -> dict[str, float]:
    """The largest of what its ranks find."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}  # fmt: skip
    command = f"{sys.executable} {Path(program).resolve()} --rank '{mode}'"
    lines = "ip link set lo up; " if own_network else ""
    lines += "".join(f"LD_PRELOAD='{preloaded}' RANK={rank} LOCAL_RANK={rank} {command} & " for rank in range(ranks)) + "wait"
    isolated = ["unshare", "-n"] if own_network else []
    done = subprocess.run([*isolated, "sh", "-c", lines], env=environment, capture_output=True, text=True, timeout=300)
    return largest(mode, ranks, done.stdout, done.stderr)


def largest(mode: str, ranks: int, printed: str, errors: str = "") -> dict[str, float]:
    found = [json.loads(line[7:]) for line in printed.splitlines() if line.startswith("RESULT ")]
    if len(found) != ranks:
        sys.exit(f"{mode}: {len(found)} of {ranks} ranks came to an end\n{errors[-2000:]}")
    return {key: max(one[key] for one in found) for key in found[0]}


def can_unshare() -> bool:
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


def main() -> None:
    own_network = can_unshare()
    parameters = sum(p.numel() for p in make_model().parameters())
    for ranks, blocks in BLOCKS.items():
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for _ in range(ROUNDS):
            for mode in MODES:
                found[mode].append(run_mode(mode, ranks, own_network))
        for mode, runs in found.items():
            seconds, how = statistics.median(one["seconds"] for one in runs), f"median of {ROUNDS} rounds in turn"
            if mode != MODES[0]:
                pair = run_mode(f"{MODES[0]};{mode};{blocks}", ranks, own_network)
                seconds = pair["seconds"]
                how = (f"{pair['ratio']:.3f} times {MODES[0]} ({pair['low']:.3f} to {pair['high']:.3f} in the half of {blocks} "
                       f"pairs around the median)")  # fmt: skip
            wire = statistics.median(one["wire"] for one in runs) / parameters
            peak = statistics.median(one["peak"] for one in runs) / 2**20
            sent = f"{wire:.2f} bytes a parameter and step on the wire; " if own_network else ""
            if counter_path().exists():
                heap = run_mode(mode, ranks, own_network, str(counter_path()))["heap"] / parameters
                sent += f"{heap:.2f} on the heap at the peak; "
            print(json.dumps({
                "name": f"{ranks} ranks/{mode}", "value": ranks * BATCH * LENGTH / seconds, "unit": "tokens/s",
                "context": f"{how}; {sent}{peak:.0f} MiB held at the peak",
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        *modes, blocks = sys.argv[2].split(";") if ";" in sys.argv[2] else (sys.argv[2], "0")
        run_rank(modes, int(blocks))
    else:
        main()
