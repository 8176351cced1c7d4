"""What `make demo` runs: the same training at its natural peak, in a quarter of it, and with optimizer states in 8 bits,
side by side; then a larger one in a container that kills the plain program."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import container

BYTELM = Path(sys.argv[1])
ARGUMENTS = sys.argv[2:]


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def train(title: str, folder: Path, *arguments: str) -> tuple[dict, bytes]:
    """Runs bytelm; its summary, and the log of its losses and parameters."""
    print(f"\n---- {title}", flush=True)
    summary, losses = folder / "summary.json", folder / "losses.jsonl"
    command = [BYTELM, *ARGUMENTS, *arguments, "--summary", summary, "--losses", losses]
    if subprocess.run([str(part) for part in command]).returncode:
        sys.exit(f"demo: {title}: bytelm failed")
    return json.loads(summary.read_text()), losses.read_bytes()


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print()
    for row in [("", *columns), *rows]:
        print(f"{row[0]:27}" + "".join(f"{cell:>18}" for cell in row[1:]))


def compare() -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, plain_log = train("at its natural peak", folder)
        budget = plain["peak_bytes"] // 4
        inside, inside_log = train(
            f"in a quarter of it, {mebibytes(budget)}",
            folder,
            *("--budget", str(budget), "--chart", "bytelm-memory-quarter.svg"),
        )
        small, _ = train("with the optimizer's states in 8 bits", folder, "--state", "int8")
    speed = ("tokens per second", *(f"{run['tokens_per_second']:.0f}" for run in (plain, inside, small)))
    loss = ("validation, bits per byte", *(f"{run['validation_bits_per_byte']:.6f}" for run in (plain, inside, small)))
    peak = ("peak of LibTorch's memory", *(mebibytes(run["peak_bytes"]) for run in (plain, inside, small)))
    states = [mebibytes(run["optimizer_state_bytes"]) for run in (plain, small)]
    states = ("of it, optimizer states", states[0], "in and out", states[1])
    table(("natural peak", "a quarter of it", "states in 8 bits"), [peak, states, speed, loss])
    same = plain_log == inside_log
    print("every loss and every parameter in a quarter: " + ("the same, bit for bit" if same else "NOT the same"))
    return same


def compare_in_container() -> bool:
    """True: the plain program was killed, and the same training within the budget ended as it does outside."""
    print(
        f"\n---- a model with {mebibytes(container.STATE_BYTES)} of parameters, gradients and optimizer state, "
        f"in a container of {mebibytes(container.LIMIT_BYTES)}: outside, killed inside, within a budget inside",
        flush=True,
    )
    if reason := container.why_not():
        print(f"left out: {reason}")
        return True
    with tempfile.TemporaryDirectory(dir=".") as name:
        outcome = container.train_in_container(BYTELM, Path(name))
    print(f"the plain program in the container: {'killed' if outcome.killed else 'NOT killed'}")
    print(
        f"within {mebibytes(container.BUDGET_BYTES)}, over a swap file: {outcome.bits_per_byte:.6f} bits per byte, "
        + ("the same as outside, bit for bit" if outcome.same else "NOT the same as outside")
    )
    return outcome.killed and outcome.same


def main() -> None:
    same = compare()
    sys.exit(0 if compare_in_container() and same else 1)


if __name__ == "__main__":
    main()
