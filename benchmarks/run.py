"""Runs every benchmark and its peers, or those asked for, and writes benchmarks/RESULTS.md. Each program prints JSON lines:
rows of a table, and points of charts.

    run.py --only shard      measures what has "shard" in its name, and leaves the other sections as they are
    run.py --only '^optim$'  just that; with REEF_CPU=avx2, which is a section of its own, on another instruction set
    run.py --only '_cuda$' --small --results FILE   whether they run; what they print then is no measurement

What a program has measured is written as soon as it ends, so that it is kept if a later program fails. A peer that is not
installed is left out; which ones are missing is said before anything is measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import charts
import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
PLAYED = "played device"  # what a CUDA device that the CPU plays (tests/device/runtime/) calls itself
OPTIONAL = ("bitsandbytes", "deepspeed", "matplotlib", "rockmate", "torchao", "torchvision")  # matplotlib draws the charts


class ProgramFailed(Exception):
    pass


def programs(build: Path) -> list[tuple[str, list[str]]]:
    ours = [(p.stem.removesuffix("_bench"), [str(p)]) for p in (build / "benchmarks").glob("*_bench")]
    ours += [(p.stem.removesuffix("_bench"), [sys.executable, str(p)]) for p in HERE.glob("*_bench.py")]
    peers = [(f"peer {p.stem}", [sys.executable, str(p)]) for p in (HERE / "peers").glob("*.py")]
    return sorted(ours) + sorted(peers)


def rows_of(command: list[str]) -> list[dict]:
    """Shows each as it comes."""
    rows = []
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as program:
            for line in program.stdout:
                if line.startswith("{"):
                    rows.append(json.loads(line))
                    print(line, end="", flush=True)
        if program.returncode != 0:
            errors.seek(0)
            raise ProgramFailed(f"{' '.join(command)} failed with exit code {program.returncode}:\n{errors.read()[-2000:]}")
    return rows


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def instruction_set() -> str:
    """What the optimizers' kernels use: as csrc/kernels/optim_step/x86.cpp finds it, or what REEF_CPU asks for."""
    if asked := os.environ.get("REEF_CPU"):
        return asked
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split(":", 1)[1].split())
            break
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        return "avx512"
    return "avx2" if {"avx2", "fma", "f16c"} <= flags else "portable"


def where() -> str:
    commit = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True,
                            check=False).stdout.strip()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return (f"{datetime.date.today().isoformat()}, commit {commit or 'unknown'}; {cpu_model()} ({instruction_set()}), "
            f"{os.cpu_count()} cores, "
            f"{platform.system()} {platform.release()}; {gpu}; torch {torch.__version__}, Python {platform.python_version()}")


def section(rows: list[dict], folder: Path) -> str:
    lines = [where(), "", "| what | value | unit | how |", "| --- | ---: | --- | --- |"]
    lines += [f"| {r['name']} | {r['value']:.4g} | {r['unit']} | {r['context']} |" for r in rows if "name" in r]
    for image in charts.draw([r for r in rows if "chart" in r], folder):
        lines += ["", image]
    return "\n".join(lines)


def markdown(sections: dict[str, str]) -> str:
    head = "# Measured\n\nWritten by `make bench`; do not edit. Compare values within one table only: machines drift.\n"
    return head + "".join(f"\n## {name}\n\n{text}\n" for name, text in sections.items())


def read_sections(results: Path) -> dict[str, str]:
    if not results.exists():
        return {}
    parts = re.split(r"^## (.+)$", results.read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def write_results(results: Path, sections: dict[str, str]) -> None:
    ours_first = sorted(sections, key=lambda name: (name.startswith("peer"), name))
    results.write_text(markdown({name: sections[name] for name in ours_first}))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="a regular expression for the names of the sections to measure")
    parser.add_argument("--small", action="store_true", help="tiny sizes, of programs for a CUDA device")
    options = parser.parse_args()
    played = torch.cuda.is_available() and torch.cuda.get_device_name(0) == PLAYED
    if (options.small or played) and options.results.resolve() == RESULTS:
        what = "tiny sizes" if options.small else "a played device"
        parser.error(f"figures of {what} are no measurements: choose another file by --results")
    return options


def main() -> None:
    options = parse_options()
    build = options.build.resolve()
    os.environ["REEF_BUILD_DIR"] = str(build)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(build / "python"), os.environ.get("PYTHONPATH"))))
    if missing := [module for module in OPTIONAL if importlib.util.find_spec(module) is None]:
        print(f"run.py: not installed, and left out of what is written: {', '.join(missing)}", file=sys.stderr)
    asked = os.environ.get("REEF_CPU")
    sections = read_sections(options.results)
    measured, failures = 0, []
    for name, command in programs(options.build):
        if not re.search(options.only, name) or (options.small and not name.endswith("_cuda")):
            continue
        try:
            rows = rows_of([*command, "--small"] if options.small else command)
        except ProgramFailed as failure:
            print(failure, file=sys.stderr)
            failures.append(name)
            continue
        if rows:  # else it needs a device that is not here
            name += f", REEF_CPU={asked}" if asked else ""
            sections[name] = section(rows, options.results.resolve().parent / "charts")
            write_results(options.results, sections)
            measured += 1
    if failures:
        sys.exit(f"run.py: failed: {', '.join(failures)}")
    if measured == 0:
        sys.exit("run.py: nothing was measured: no section is named so, or the device that it needs is not here")


if __name__ == "__main__":
    main()
