"""Runs every benchmark and its peers, and writes benchmarks/RESULTS.md. Each program prints JSON lines."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def programs(build: Path) -> list[tuple[str, list[str]]]:
    ours = [(p.stem.removesuffix("_bench"), [str(p)]) for p in sorted((build / "benchmarks").glob("*_bench"))]
    peers = [(f"peer {p.stem}", [sys.executable, str(p)]) for p in sorted((HERE / "peers").glob("*.py"))]
    return ours + peers


def rows_of(command: list[str]) -> list[dict]:
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with exit code {out.returncode}:\n{out.stderr[-2000:]}")
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def markdown(sections: list[tuple[str, list[dict]]]) -> str:
    commit = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True,
                            check=False).stdout.strip()
    lines = [
        "# Measured",
        "",
        "Written by `make bench`; do not edit. Compare values within one table only: machines drift.",
        "",
        f"- date: {datetime.date.today().isoformat()}, commit {commit or 'unknown'}",
        f"- machine: {cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        "- GPU: " + (torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none; nothing here ran on one"),
    ]
    for name, rows in sections:
        if not rows:  # needs a device that is not here
            continue
        lines += ["", f"## {name}", "", "| what | value | unit | how |", "| --- | ---: | --- | --- |"]
        lines += [f"| {r['name']} | {r['value']:.4g} | {r['unit']} | {r['context']} |" for r in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    arguments = parser.parse_args()
    sections = []
    for name, command in programs(arguments.build):
        rows = rows_of(command)
        for row in rows:
            print(json.dumps(row), flush=True)
        sections.append((name, rows))
    arguments.results.write_text(markdown(sections))


if __name__ == "__main__":
    main()
