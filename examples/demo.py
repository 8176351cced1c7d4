"""What `make demo` runs: the same training twice, at its natural peak and in a quarter of it, side by side; then a
larger one in a container that kills the plain program."""

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


def compare_at_a_quarter() -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, plain_log = train("at its natural peak", folder)
        budget = plain["peak_bytes"] // 4
        inside, inside_log = train(
            f"in a quarter of it, {mebibytes(budget)}",
            folder,
            *("--budget", str(budget), "--chart", "bytelm-memory-quarter.svg"),
        )
    rows = [
        ("peak of LibTorch's memory", *(mebibytes(run["peak_bytes"]) for run in (plain, inside))),
        ("tokens per second", *(f"{run['tokens_per_second']:.0f}" for run in (plain, inside))),
        ("validation, bits per byte", *(f"{run['validation_bits_per_byte']:.6f}" for run in (plain, inside))),
    ]
    print(f"\n{'':27}{'natural peak':>16}{'a quarter':>16}")
    for what, left, right in rows:
        print(f"{what:27}{left:>16}{right:>16}")
    same = plain_log == inside_log
    print("every loss and every parameter: " + ("the same, bit for bit" if same else "NOT the same"))
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
    same = compare_at_a_quarter()
    sys.exit(0 if compare_in_container() and same else 1)


if __name__ == "__main__":
    main()
