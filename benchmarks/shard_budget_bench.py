"""Training at stage "parameters" on two ranks inside a budget, by its size: with room, gathered parameters stay; with less
than a step needs, parts, gradients and optimizer states leave for a disk (ZeRO-Infinity). The model of peers/shard_train.py,
every budget in turn in fresh processes."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
import shard_train

RANKS, ROUNDS = 2, 3
STEPS_BEFORE = 6  # until the room for gathered parameters is what it will be
PERCENT = (140, 120, 100, 85, 70)
PLENTY = 1 << 40
WITHOUT = "without a budget"


def run_rank(budget_bytes: int) -> None:
    """Of a budget of so many bytes; 0: without one; PLENTY: to see what a step needs."""
    shard_train.begin_rank()
    import reef
    import torch

    model = shard_train.make_model()
    resident = 0 if budget_bytes in (0, PLENTY) else None
    sharded = reef.shard(model, stage="parameters", bucket_bytes=shard_train.BUCKET, resident_bytes=resident)
    # Parameter by parameter: a fused step needs all states at once.
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, weight_decay=0.01, foreach=False)
    if budget_bytes == 0:
        shard_train.end_rank(shard_train.measure(model, optimizer, STEPS_BEFORE))
    with tempfile.TemporaryDirectory() as directory:
        budget = reef.budget(budget_bytes, spill=directory, restore=False).start()
        shard_train.measure(model, optimizer, STEPS_BEFORE)
        budget.reset_use()
        found = shard_train.measure(model, optimizer, 0)
        use = budget.use()
        found |= {"peak_bytes": use.peak_bytes, "resident": sharded.resident_bytes,
                  "moved": (use.bytes_in + use.bytes_out) / shard_train.STEPS}  # fmt: skip
        shard_train.end_rank(found)


def main() -> None:
    own_network = shard_train.can_unshare()
    parameters = sum(p.numel() for p in shard_train.make_model().parameters())

    def run(budget_bytes: int) -> dict[str, float]:
        return shard_train.run_mode(str(budget_bytes), RANKS, own_network, program=__file__)

    needed_bytes = int(run(PLENTY)["peak_bytes"])
    budgets = {WITHOUT: 0} | {f"{percent} %": needed_bytes * percent // 100 for percent in PERCENT}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in budgets}
    for _ in range(ROUNDS):
        for name, budget_bytes in budgets.items():
            found[name].append(run(budget_bytes))
    for name, runs in found.items():
        tokens = statistics.median(RANKS * shard_train.BATCH * shard_train.LENGTH / one["seconds"] for one in runs)
        ratio = statistics.median(first["seconds"] / one["seconds"] for first, one in zip(found[WITHOUT], runs, strict=True))
        wire = statistics.median(one["wire"] for one in runs) / parameters
        sent = f"; {wire:.2f} bytes a parameter and step on the wire" if own_network else ""
        inside = ""
        if name != WITHOUT:
            inside = (f"; a budget of {budgets[name] / 2**20:.0f} MiB a rank, {runs[-1]['resident'] / 2**20:.0f} MiB for gathered "
                      f"parameters, {statistics.median(one['moved'] for one in runs) / 2**20:.0f} MiB a step to and from the disk")  # fmt: skip
        print(json.dumps({"name": f"stage parameters, {RANKS} ranks/{name}", "value": tokens, "unit": "tokens/s",
                          "context": f"median of {ROUNDS} rounds in turn; {ratio:.3g} times {WITHOUT}{sent}{inside}"}),
              flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(int(sys.argv[2]))
    else:
        main()
