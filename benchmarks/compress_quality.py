"""What compression of gradients costs in quality: bytelm's model by AdamW (validation loss) and an MLP on scikit-learn's digits by
SGD with momentum (accuracy), on four ranks, by each method, on equal steps, batches and models. Learning rates are tuned on both
sides, with seed 0, and results are of three seeds. Densities have a warm-up, over the first fifth of the steps. Writes a section of
benchmarks/QUALITY.md; an hour on two cores, which --log makes resumable. Without scikit-learn there are no digits."""

from __future__ import annotations

import argparse
import datetime
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

RANKS, SEEDS = 4, 3
SECTION = "# What compression of gradients costs in quality"
METHODS = {
    "none": {},
    "bfloat16": {},
    "qsgd, 8 bits": {"bits": 8},
    "qsgd, 4 bits": {"bits": 4},
    "sign": {},
    "powersgd, rank 4": {"rank": 4},
    "powersgd_alternating, rank 4": {"rank": 4},
    "topk, 0.01": {"density": 0.01},
    "gtopk, 0.01": {"density": 0.01},
    "gtopk_tree, 0.01": {"density": 0.01},
    "gtopk, 0.001": {"density": 0.001},
    "gtopk_tree, 0.001": {"density": 0.001},
}


def compression(name: str, steps: int) -> reef.Compression:
    options = dict(METHODS[name])
    if "density" in options:
        options["density"] = {round(steps * share): max(density, options["density"])
                              for share, density in ((0, 0.25), (0.05, 0.0625), (0.1, 0.0156), (0.15, 0.004), (0.2, 0.0))}  # fmt: skip
    return reef.Compression(name.split(",")[0], **options)


class Bytelm:
    name, unit, steps = "bytelm", "bits per byte", 400
    learning_rates = (1.5e-3, 3e-3, 6e-3)
    args = argparse.Namespace(width=64, depth=2, heads=4, context=64)
    batch, validated = 4, 256

    def __init__(self, seed: int) -> None:
        self.text, self.validation, _ = bytelm_corpus.load_corpus([], self.args.context + 1)
        torch.manual_seed(seed)
        self.batches = torch.Generator().manual_seed(seed)
        self.model = bytelm_model.ByteGPT(self.args)

    def optimizer(self, parameters, lr: float):
        return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)

    def loss(self, rank: int) -> torch.Tensor:
        window = self.args.context + 1
        offsets = torch.randint(self.text.numel() - window + 1, (self.batch * RANKS,), generator=self.batches)
        return self._loss_at(self.text, offsets[rank * self.batch : (rank + 1) * self.batch])

    def _loss_at(self, text: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        data = bytelm_corpus.windows_at(text, offsets, self.args.context + 1)
        return torch.nn.functional.cross_entropy(self.model(data[:, :-1]), data[:, 1:].flatten())

    def result(self) -> float:
        offsets = torch.randint(self.validation.numel() - self.args.context, (self.validated,), generator=torch.Generator().manual_seed(99))
        loss = self._loss_at(self.validation, offsets).item() / math.log(2)
        return loss if math.isfinite(loss) else math.inf

    @staticmethod
    def difference(result: float, plain: float) -> float:
        """Per cent; below zero is better."""
        return 100 * (result / plain - 1)

    sign = "%"


class Digits:
    name, unit, steps = "digits", "per cent wrong", 1800
    learning_rates = (0.02, 0.05, 0.1, 0.2)
    batch = 16

    def __init__(self, seed: int) -> None:
        from sklearn.datasets import load_digits

        images, digits = load_digits(return_X_y=True)
        data = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(7))
        self.training = [each[order[:1437]] for each in data]
        self.validation = [each[order[1437:]] for each in data]
        torch.manual_seed(seed)
        self.batches = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128), torch.nn.ReLU(),
                                         torch.nn.Linear(128, 10))  # fmt: skip

    def optimizer(self, parameters, lr: float):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    def loss(self, rank: int) -> torch.Tensor:
        which = torch.randint(len(self.training[1]), (self.batch * RANKS,), generator=self.batches)
        images, digits = (each[which[rank * self.batch : (rank + 1) * self.batch]] for each in self.training)
        return torch.nn.functional.cross_entropy(self.model(images), digits)

    def result(self) -> float:
        images, digits = self.validation
        return 100 * (self.model(images).argmax(1) != digits).double().mean().item()

    @staticmethod
    def difference(result: float, plain: float) -> float:
        return result - plain

    sign = "points"


TASKS = {task.name: task for task in (Digits, Bytelm)}


def train(group, run: dict) -> tuple[float, int]:
    """The task's result, and bytes that this rank has sent of gradients."""
    task = TASKS[run["task"]](run["seed"])
    sharded = reef.shard(task.model, group, compression=compression(run["method"], task.steps))
    optimizer = task.optimizer(sharded.parameters(), run["lr"])
    for step in range(task.steps):
        for options in optimizer.param_groups:
            options["lr"] = learning_rate(step, task.steps, run["lr"])
        optimizer.zero_grad()
        task.loss(group.rank()).backward()
        optimizer.step()
    with torch.no_grad():
        result = task.result()
    sent = sharded.sent_bytes
    sharded.end()
    return result, sent


def work(runs: list[dict]) -> None:
    """One rank's part of these."""
    torch.set_num_threads(1)
    group = reef.init_process_group()
    for run in runs:
        result, sent = train(group, run)
        if group.rank() == 0:
            print(json.dumps({**run, "result": result, "sent": sent}), flush=True)


def measured(runs: list[dict], log: Path | None) -> list[dict]:
    return measure([__file__], RANKS, runs, lambda run: json.dumps([run["task"], run["method"], run["lr"], run["seed"]]), log)


def table(task, best: dict[str, list[dict]], tried: list[dict]) -> list[str]:
    lines = [
        f"{task.name}: {task.steps} steps of {RANKS * task.batch} examples; {task.unit}, and the difference to `none` of the same seed",
        "", "| | rate | " + " | ".join(f"seed {seed}" for seed in range(SEEDS)) + " | median difference | bytes of a rank | fewer |",
        "| --- | --- |" + " ---: |" * (SEEDS + 3),
    ]  # fmt: skip
    plain = best["none"]
    for method, rows in best.items():
        apart = [task.difference(row["result"], other["result"]) for row, other in zip(rows, plain, strict=True)]
        cells = " | ".join(f"{row['result']:.4g} ({d:+.2f})" for row, d in zip(rows, apart, strict=True))
        sent = rows[0]["sent"]
        lines.append(f"| {method} | {rows[0]['lr']:g} | {cells} | {statistics.median(apart):+.2f} {task.sign} | {sent / 1e6:.2f} MB | "
                     f"{plain[0]['sent'] / sent:.1f} x |")  # fmt: skip
    lines += ["", "Seed 0 with each rate:", ""]
    for method in best:
        rows = [row for row in tried if row["method"] == method]
        lines.append(f"- {method}: " + ", ".join(f"{row['lr']:g}: {row['result']:.4g}" for row in rows))
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--log", type=Path, help="keep results here, and take those that are there: of the same build only")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(json.loads(options.work))
    lines = [
        SECTION, "",
        "Written by `python benchmarks/compress_quality.py --results benchmarks/QUALITY.md`; do not edit. "
        f"{RANKS} ranks at `replicate`; one model and the same batches for all methods of a seed. Rates are the best for seed 0 of those "
        "that were tried, which are listed; densities come down from 0.25 over the first fifth of the steps; bytes as Reef's own counters "
        "have them.", "",
        f"- date: {datetime.date.today().isoformat()}, torch {torch.__version__}", "",
    ]  # fmt: skip
    for name in options.tasks:
        task = TASKS[name]
        tuning = [{"task": name, "method": method, "lr": lr, "seed": 0} for method in METHODS for lr in task.learning_rates]
        tried = measured(tuning, options.log)
        chosen = {method: min((row for row in tried if row["method"] == method), key=lambda row: row["result"]) for method in METHODS}
        again = [{"task": name, "method": method, "lr": row["lr"], "seed": seed} for method, row in chosen.items() for seed in range(SEEDS)]
        found = measured(again, options.log)
        lines += table(task, {method: [row for row in found if row["method"] == method] for method in METHODS}, tried)
    if options.results:
        write_section(options.results, "\n".join(lines))


if __name__ == "__main__":
    main()
