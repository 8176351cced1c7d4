"""Runs of training on several ranks, whose results are kept in a log; and the learning rate that they share."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def learning_rate(step: int, steps: int, largest: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return largest * (step + 1) / warm_up
    return largest * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def measure(program: list[str], ranks: int, runs: list[dict], key: Callable[[dict], str], log: Path | None) -> list[dict]:
    """Gives a row for each run: from the log, or else trained now by ``program --work RUNS``, whose rank 0 prints a row of JSON
    for each. Rows that have the same ``key`` are of the same run. Ends this process if a rank fails."""
    known = {key(row): row for row in map(json.loads, log.read_text().splitlines())} if log and log.exists() else {}
    missing = [run for run in runs if key(run) not in known]
    if missing:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        line = [sys.executable, *program, "--work", json.dumps(missing)]
        started = [subprocess.Popen(line, env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                                    stdout=subprocess.PIPE if rank == 0 else None) for rank in range(ranks)]  # fmt: skip
        for text in started[0].stdout:
            print(text, end="", flush=True)
            row = json.loads(text)
            known[key(row)] = row
            if log:
                with log.open("a") as kept:
                    kept.write(text)
        if any(rank.wait() for rank in started):
            sys.exit("a rank has failed")
    return [known[key(run)] for run in runs]
