"""What `make demo` runs: the same training twice, at its natural peak and in a quarter of it, side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

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


def main() -> None:
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
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
