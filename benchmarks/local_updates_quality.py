"""What rounds of local steps cost in quality, and save in bytes: bytelm's model on two ranks, by steps over all ranks, by DiLoCo
(50 local steps, an outer step with Nesterov momentum), the same with its exchange in two parts beside the next steps, and by
the mean of parameters, on equal tokens, from a model that all ranks have begun together (as in 2311.08105). Learning rates are
tuned on both sides, with seed 0, and losses are of three seeds. Writes a section of benchmarks/QUALITY.md; ten minutes on two
cores, which --log makes resumable."""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import math
import statistics
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "python"))

import bytelm_corpus  # noqa: E402
import bytelm_model  # noqa: E402
import reef  # noqa: E402
from logged_runs import learning_rate, measure  # noqa: E402
from result_sections import write_section  # noqa: E402

RANKS, LOCAL_STEPS, SEEDS, VALIDATED = 2, 50, 3, 256
BEGINNING = 200
"""Steps over all ranks, before the two sides part."""
MODEL = argparse.Namespace(width=64, depth=2, heads=4, context=64)
BATCH = 8
LEARNING_RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
OUTER = {
    "synchronous": [None],
    "DiLoCo": [{"outer_lr": rate, "outer_momentum": 0.9} for rate in (0.4, 0.7)],
    "mean of parameters": [{"outer_lr": 1.0, "outer_momentum": 0.0}],
}
STREAMING, IN_PARTS = "DiLoCo in 2 parts, beside 5 steps", {"parts": 2, "overlap_steps": 5, "mixing": 0.5}
"""With the rates that are best for DiLoCo."""
SECTION = "# What rounds of local steps cost in quality"


class Training:
    """A model of a seed, and the ranks' batches of it."""

    def __init__(self, group, text: torch.Tensor, seed: int) -> None:
        self.group, self.text = group, text
        torch.manual_seed(seed)
        self.batches = torch.Generator().manual_seed(seed)
        self.model = bytelm_model.ByteGPT(MODEL)
        self.sharded = reef.shard(self.model, group)
        self.optimizer = torch.optim.AdamW(self.sharded.parameters(), betas=(0.9, 0.95), weight_decay=0.01)

    def step(self, lr: float) -> None:
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        window = MODEL.context + 1
        offsets = torch.randint(self.text.numel() - window + 1, (BATCH * self.group.size(),), generator=self.batches)
        data = bytelm_corpus.windows_at(self.text, offsets.narrow(0, BATCH * self.group.rank(), BATCH), window)
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(data[:, :-1]), data[:, 1:].flatten()).backward()
        self.optimizer.step()


@functools.cache
def beginning(group, text: torch.Tensor, seed: int) -> tuple[dict, dict, torch.Tensor]:
    """What all ranks have made together: the model, the optimizer's states, and where batches go on."""
    training = Training(group, text, seed)
    for step in range(BEGINNING):
        training.step(3e-3 * min(1.0, (step + 1) / 20))
    states = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict(), training.batches.get_state()))
    training.sharded.end()
    return states


def train(group, text, validation, run: dict, steps: int) -> tuple[float, int]:
    """Bits per byte in validation, infinite if the loss was, and bytes that this rank has sent."""
    of_model, of_optimizer, of_batches = beginning(group, text, run["seed"])
    training = Training(group, text, run["seed"])
    training.model.load_state_dict(of_model)
    training.optimizer.load_state_dict(copy.deepcopy(of_optimizer))
    training.batches.set_state(of_batches)
    model, sharded = training.model, training.sharded
    updates = run["outer"] and reef.LocalUpdates(sharded, local_steps=LOCAL_STEPS, **run["outer"])
    for step in range(steps):
        training.step(learning_rate(step, steps, run["lr"]))
        if updates:
            updates.step()
    window = MODEL.context + 1
    sent = sharded.sent_bytes
    if updates:
        sent += updates.sent_bytes
        updates.finish()
        updates.close()
    with torch.no_grad():
        offsets = torch.randint(validation.numel() - window + 1, (VALIDATED,), generator=torch.Generator().manual_seed(99))
        data = bytelm_corpus.windows_at(validation, offsets, window)
        loss = torch.nn.functional.cross_entropy(model(data[:, :-1]), data[:, 1:].flatten()).item() / math.log(2)
    sharded.end()
    return loss if math.isfinite(loss) else math.inf, sent


def work(runs: list[dict], steps: int) -> None:
    """One rank's part of these."""
    torch.set_num_threads(1)
    group = reef.init_process_group()
    text, validation, _ = bytelm_corpus.load_corpus([], MODEL.context + 1)
    for run in runs:
        loss, sent = train(group, text, validation, run, steps)
        if group.rank() == 0:
            print(json.dumps({**run, "loss": loss, "sent": sent, "steps": steps}), flush=True)


def measured(runs: list[dict], steps: int, log: Path | None) -> list[dict]:
    """Of so many steps."""

    def key(run: dict) -> str:
        return json.dumps([run["name"], run["outer"], run["lr"], run["seed"], run.get("steps", steps)])

    return measure([__file__, "--steps", str(steps)], RANKS, runs, key, log)


def markdown(best: dict[str, list[dict]], tried: list[dict], steps: int) -> str:
    plain = best["synchronous"]
    lines = [
        SECTION, "",
        "Written by `python benchmarks/local_updates_quality.py --results benchmarks/QUALITY.md`; do not edit. "
        f"bytelm's model ({MODEL.depth} blocks of width {MODEL.width}, context {MODEL.context}) by AdamW on {RANKS} ranks of "
        f"{BATCH} windows, on the same batches from one model, which all ranks have trained together for {BEGINNING} steps; "
        f"rounds of {LOCAL_STEPS} steps. Validation loss in bits per byte, and its difference to steps over all ranks with the same seed. Rates are the best for seed 0 of those "
        "that were tried, which are listed.", "",
        f"- date: {datetime.date.today().isoformat()}, torch {torch.__version__}",
        f"- {steps} steps on each side, {steps * RANKS * BATCH * MODEL.context / 1e6:.1f} million bytes of text; bytes as "
        "Reef's own counters have them", "",
        "| | rates | " + " | ".join(f"seed {seed}" for seed in range(SEEDS)) + " | median difference | bytes sent by a rank | fewer |",
        "| --- | --- |" + " ---: |" * (SEEDS + 3),
    ]  # fmt: skip
    for name, rows in best.items():
        to_plain = [100 * (row["loss"] / other["loss"] - 1) for row, other in zip(rows, plain, strict=True)]
        cells = " | ".join(f"{row['loss']:.4f} ({d:+.2f} %)" for row, d in zip(rows, to_plain, strict=True))
        sent = rows[0]["sent"]
        lines.append(f"| {name} | {rates(rows[0])} | {cells} | {statistics.median(to_plain):+.2f} % | {sent / 1e6:.2f} MB | "
                     f"{plain[0]['sent'] / sent:.1f} x |")  # fmt: skip
    lines += ["", "Seed 0 with each pair of rates:", ""]
    lines += [f"- {name}: " + ", ".join(f"{rates(row)}: {row['loss']:.4f}" for row in tried if row["name"] == name) for name in OUTER]
    return "\n".join(lines) + "\n"


def rates(row: dict) -> str:
    outer = row["outer"]
    return f"{row['lr']:g}" if not outer else f"{row['lr']:g}, outer {outer['outer_lr']:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--log", type=Path, help="keep losses here, and take those that are there: of the same build only")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(json.loads(options.work), options.steps)
    tuning = [{"name": name, "outer": outer, "lr": lr, "seed": 0}
              for name, outers in OUTER.items() for outer in outers for lr in LEARNING_RATES]  # fmt: skip
    tried = measured(tuning, options.steps, options.log)
    chosen = {name: min((row for row in tried if row["name"] == name), key=lambda row: row["loss"]) for name in OUTER}
    chosen[STREAMING] = {**chosen["DiLoCo"], "outer": {**chosen["DiLoCo"]["outer"], **IN_PARTS}}
    again = [{"name": name, "outer": row["outer"], "lr": row["lr"], "seed": seed}
             for name, row in chosen.items() for seed in range(SEEDS)]  # fmt: skip
    found = measured(again, options.steps, options.log)
    best = {name: [row for row in found if row["name"] == name] for name in chosen}
    if options.results:
        write_section(options.results, markdown(best, tried, options.steps))


if __name__ == "__main__":
    main()
