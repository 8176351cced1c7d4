"""A container that kills the plain program: its parameters, gradients and AdamW's state are four times the memory limit.
Within a budget, over a swap file, the same training ends there as it does outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LIMIT_BYTES = 384 << 20
BUDGET_BYTES = 128 << 20  # what LibTorch and its libraries take by themselves is beside it
WIDTH, DEPTH = 1024, 8
STATE_BYTES = 12 * WIDTH**2 * DEPTH * 4 * 4  # parameters, gradients, AdamW's two moments; the embeddings are left out

JOIN = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A control group that may use so much memory, page cache included, and no swap; OSError where none can be made."""
    unified = (ROOT / "cgroup.controllers").exists()
    if unified and "memory" not in (ROOT / "cgroup.subtree_control").read_text().split():
        (ROOT / "cgroup.subtree_control").write_text("+memory")
    group = (ROOT if unified else ROOT / "memory") / f"reef-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        for name, value in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
            if (group / name).exists():
                (group / name).write_text(value)
        yield group
    finally:
        for _ in range(100):  # a killed process leaves its group a moment later
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def run_limited(command: list[str], limit_bytes: int, **how) -> subprocess.CompletedProcess:
    """subprocess.run(command) within the limit; a program that exceeds it is killed (return code -9)."""
    with memory_limit(limit_bytes) as group:
        return subprocess.run(["/bin/sh", "-c", JOIN, str(group), *command], **how)


def why_not() -> str:
    """Why programs cannot be limited here; "" if they can."""
    try:
        with memory_limit(1 << 30):
            return ""
    except OSError as error:
        return f"control groups cannot be made here: {error}"


@dataclass
class Outcome:
    killed: bool  # the plain program, in the container
    same: bool  # every loss and parameter within the budget there, and of the plain program outside
    peak_bytes: int  # of LibTorch's memory, within the budget
    bits_per_byte: float


def train_in_container(program: Path, folder: Path) -> Outcome:
    """Trains two steps: plainly outside, plainly inside, within a budget inside. CalledProcessError if the first or the
    last fails."""
    text = folder / "text"
    text.write_bytes(Path(__file__).read_bytes()[:4000])

    def command(name: str, **more) -> list[str]:
        options = dict(data=text, width=WIDTH, depth=DEPTH, heads=8, context=16, batch=8, steps=2, threads=1, sample=0)
        options |= dict(losses=folder / name, summary=folder / f"{name}.json", **more)
        arguments = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
        return [str(program), *arguments, "--no-ledger"]

    subprocess.run(command("plain"), check=True)
    killed = run_limited(command("killed"), LIMIT_BYTES)
    run_limited(command("inside", budget=BUDGET_BYTES, spill=folder), LIMIT_BYTES, check=True)
    summary = json.loads((folder / "inside.json").read_text())
    return Outcome(
        killed=killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL),
        same=(folder / "inside").read_bytes() == (folder / "plain").read_bytes(),
        peak_bytes=summary["peak_bytes"],
        bits_per_byte=summary["validation_bits_per_byte"],
    )
