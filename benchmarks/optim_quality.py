"""What optimizer states of few bits cost: bytelm's validation loss by format and seed, beside float32 of the same seed,
and beside 4-bit states whose second moment has a code for zero, as the published ones must not. Writes
benchmarks/QUALITY.md; more than an hour on two cores, which --log makes resumable. Losses of two
runs that differ in a rounding are some tenths of a per cent apart: hence six seeds, and their median."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "python"))

import bytelm  # noqa: E402
import reef  # noqa: E402
from result_sections import write_section  # noqa: E402

ABLATION = "int4, a zero in the second moment"
BOUNDS = {"bfloat16": 0.5, "int8": 0.5, "companded8": 0.5, "int4": 1.0, "int8_compensated": 0.5,
          "companded8_compensated": 0.5, "int4_compensated": 1.0, "int4_rank1": 1.0}  # fmt: skip
"""Per cent of the float32 loss."""


class ZeroInSecondMoment(torch.optim.Optimizer):
    """AdamW with int4 states as Reef has them, but for a linear map of the second moment that begins at zero."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, dict(lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01))

    @staticmethod
    def through_codes(v: torch.Tensor) -> torch.Tensor:
        flat = torch.nn.functional.pad(v.flatten(), (0, -v.numel() % 128)).view(-1, 128)
        scale = flat.amax(1, keepdim=True).clamp_min(1e-38)
        return ((flat / scale * 15).round() / 15 * scale).flatten()[: v.numel()].view_as(v)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m, v = state["m"], state["v"]
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denominator = (v / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
                if p.numel() >= 4096:
                    code, scale = torch.ops.reef.optim_encode(m, "int4", True)
                    m.copy_(torch.ops.reef.optim_decode(code, scale, m, "int4", True))
                    v.copy_(self.through_codes(v))


def run(program: Path, state: str, seed: int, steps: int, threads: int, folder: Path) -> float:
    """Bits per byte in validation; infinite if the loss was."""
    summary = folder / "summary.json"
    summary.unlink(missing_ok=True)
    line = [*("--optimizer", "adamw"), *("--seed", str(seed)), *("--steps", str(steps)), *("--threads", str(threads)),
            *("--eval-every", str(steps)), *("--sample", "0"), "--no-ledger", *("--summary", str(summary))]  # fmt: skip
    if state == ABLATION:
        bytelm.make_optimizer = lambda options, parameters: ZeroInSecondMoment(parameters, options.learning_rate)
        with contextlib.redirect_stdout(sys.stderr):
            returncode = bytelm.main(line)
    else:
        returncode = subprocess.run([program, *line, "--state", state], stdout=subprocess.DEVNULL).returncode
    if returncode == 1:
        return math.inf
    if returncode:
        sys.exit(f"bytelm failed with {state}")
    return json.loads(summary.read_text())["validation_bits_per_byte"]


def losses_in(log: Path | None) -> dict[str, float]:
    if log is None or not log.exists():
        return {}
    return {row["name"]: row["value"] for row in map(json.loads, log.read_text().splitlines())}


def differences(found: dict[str, list[float]], state: str) -> list[float]:
    """To float32 of the same seed, in per cent."""
    return [100 * (loss / plain - 1) for loss, plain in zip(found[state], found["float32"], strict=True)]


def markdown(found: dict[str, list[float]], seeds: int, steps: int) -> str:
    lines = [
        "# What states of few bits cost in quality", "",
        "Written by `make quality`; do not edit. AdamW at the learning rate that suits float32, the same text, parameters "
        "and batches for all formats of a seed.", "",
        f"- date: {datetime.date.today().isoformat()}, torch {torch.__version__}",
        f"- bytelm, {steps} steps, {seeds} seeds; validation loss in bits per byte, and its difference to float32 of the "
        "same seed", "",
        "| states | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + " | median difference | bound |",
        "| --- |" + " ---: |" * (seeds + 2),
    ]  # fmt: skip
    for state, losses in found.items():
        to_plain = differences(found, state)
        cells = [f"{loss:.4f} ({d:+.2f} %)" for loss, d in zip(losses, to_plain, strict=True)]
        bound = f"{BOUNDS[state]} %" if state in BOUNDS else "must fail" if state == ABLATION else ""
        lines.append(f"| {state} | {' | '.join(cells)} | {statistics.median(to_plain):+.2f} % | {bound} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--log", type=Path, help="keep losses here, and take those that are there: of the same build only")
    options = parser.parse_args()
    states = [*reef.optim.STATES, ABLATION]
    found: dict[str, list[float]] = {state: [] for state in states}
    known = losses_in(options.log)
    threads = min(4, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for state in states:
                name = f"quality/{state}, seed {seed}, {options.steps} steps"
                if name not in known:
                    program = options.build / "examples" / "bytelm"
                    known[name] = run(program, state, seed, options.steps, threads, Path(folder))
                    line = json.dumps({"name": name, "value": known[name], "unit": "bits per byte"})
                    print(line, flush=True)
                    if options.log:
                        with options.log.open("a") as log:
                            log.write(line + "\n")
                found[state].append(known[name])
    if options.results:
        write_section(options.results, markdown(found, options.seeds, options.steps))
    for state, bound in BOUNDS.items():
        median = statistics.median(differences(found, state))
        if median > bound:
            sys.exit(f"{state}: {median:.2f} % above float32, more than {bound} %")


if __name__ == "__main__":
    main()
