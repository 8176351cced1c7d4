#!/usr/bin/env python3
"""The first half hour on a real CUDA device, in the order in which its answers are worth most: what is there, the tests beside
each other, the sanitizer, then by themselves the benchmarks and a profile. Every log is kept; what was found is a table.

    device_session.py build                     everything
    device_session.py build --only tests        one group: tests, sanitizer, benchmarks or profile
    device_session.py build --logs FOLDER       where the logs go (build/device-session)
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-X", "faulthandler", "-m", "pytest", "-v", "--tb=short", "-rs", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    seconds: int
    """It is ended after so many."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    step: Step
    status: str
    seconds: float
    last_line: str


def unit(build: Path, name: str, chosen: str, seconds: int) -> Step:
    return Step(name, (str(build / "tests" / name), f"--gtest_filter={chosen}"), seconds)


def python_test(name: str, seconds: int, *arguments: str) -> Step:
    return Step(name, (*PYTEST, str(ROOT / "tests/python" / f"{name}.py"), *arguments), seconds)


def tests(build: Path) -> list[Step]:
    bytelm = (str(build / "examples/bytelm"), "--device", "cuda", "--steps", "50", "--data", str(ROOT / "docs"), "--sample", "0")
    return [
        unit(build, "budget_test", "Cuda/*", 400),
        python_test("test_optim_cuda", 300),
        python_test("test_budget_cuda", 300),
        python_test("test_shard_cuda", 300),
        python_test("test_checkpoint_cuda", 300),
        unit(build, "optim_test", "*", 200),
        unit(build, "ledger_test", "*", 200),
        unit(build, "count_nonfinite_test", "*", 200),
        unit(build, "top_k_cuda_test", "*", 200),
        unit(build, "shard_test", "*OnADevice*", 200),
        Step("bytelm", bytelm, 200),
    ]


def sanitizer(build: Path) -> list[Step]:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

    def under(check: str, step: Step) -> Step:
        return Step(f"{check} {step.name}", (tool, f"--tool={check}", "--error-exitcode=9", *step.command), 400, step.environment)

    few = ("-k", "test_is_the_cpus_step and AdamW and not masters and (float32 or int4)")
    without_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a write behind a tensor stays inside a segment
    kernels = python_test("test_optim_cuda", 400, *few)
    return [
        under("memcheck", Step(kernels.name, kernels.command, 400, without_cache)),
        under("racecheck", kernels),
        under("synccheck", kernels),
        under("memcheck", unit(build, "count_nonfinite_test", "*Cuda*:*Device*", 200)),
        under("memcheck", unit(build, "top_k_cuda_test", "*Much*:*Nothing*", 200)),
        under("racecheck", unit(build, "top_k_cuda_test", "*Much*:*Nothing*", 200)),
    ]


def benchmarks(build: Path) -> list[Step]:
    run = (sys.executable, str(ROOT / "benchmarks/run.py"), "--build", str(build), "--only", "_cuda$")
    return [Step("benchmarks", run, 900)]


def profile(build: Path) -> list[Step]:
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    counters = ("launch__registers_per_thread,sm__warps_active.avg.pct_of_peak_sustained_active,"
                "dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum")  # fmt: skip
    program = (
        "import torch, reef\n"
        "for state in reef.optim.STATES:\n"
        "    p = torch.nn.Parameter(torch.randn(1 << 26, device='cuda')); p.grad = torch.randn_like(p)\n"
        "    step = reef.optim.AdamW([p], lr=1e-4, state=state).step\n"
        "    step(); step()\n"
    )
    command = (ncu, "--clock-control", "none", "--metrics", counters, "-k", "regex:step", sys.executable, "-c", program)
    return [Step("profile", command, 200)]


GROUPS = {"tests": (tests, 5), "sanitizer": (sanitizer, 4), "benchmarks": (benchmarks, 1), "profile": (profile, 1)}
"""Of each what it runs, and how many of them beside each other."""


def run(step: Step, build: Path, logs: Path) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": f"{build / 'python'}:{ROOT / 'tests/python'}", "REEF_BUILD_DIR": str(build),
                   "CUBLAS_WORKSPACE_CONFIG": ":16:8", **step.environment}  # fmt: skip
    log = logs / (step.name.replace(" ", "-") + ".log")
    begin = time.monotonic()
    with log.open("w") as out:
        try:
            code = subprocess.run(step.command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT / "tests",
                                  timeout=step.seconds, check=False).returncode  # fmt: skip
            status = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            status = f"ended after {step.seconds} s"
        except FileNotFoundError as error:
            status = f"not run: no {error.filename}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(step, status, time.monotonic() - begin, lines[-1][:100] if lines else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--only", choices=GROUPS, action="append")
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args()
    build = options.build.resolve()
    logs = (options.logs or build / "device-session").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for name, (steps_of, beside) in GROUPS.items():
        if options.only and name not in options.only:
            continue
        print(f"-- {name}", flush=True)
        with ThreadPoolExecutor(beside) as pool:
            for outcome in pool.map(lambda step: run(step, build, logs), steps_of(build)):
                outcomes.append(outcome)
                print(f"{outcome.step.name:32} {outcome.seconds:6.0f} s  {outcome.status:20} {outcome.last_line}", flush=True)
    failed = [outcome for outcome in outcomes if outcome.status != "passed"]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} passed; logs in {logs}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
