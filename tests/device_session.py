#!/usr/bin/env python3
"""The first half hour on a real CUDA device, in the order in which its answers are worth most: what is there, the tests beside
each other, the sanitizer, budgets, then by themselves the benchmarks, which write benchmarks/RESULTS.md, and a profile.

    device_session.py build                     everything
    device_session.py build --only tests        one group: tests, sanitizer, budgets, benchmarks or profile
    device_session.py build --rehearse          a small row of each step, and no figure leaves the folder of logs
    device_session.py build --logs FOLDER       where the logs and summary.md go (build/device-session)
    device_session.py build --minutes 60        when to stop (30); what is left is said not to have been run

A step has passed if it ended well and its log shows that it did something. summary.md is written after each of them. Ends with 1
if a step failed, with 2 if none did but some were not run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-X", "faulthandler", "-m", "pytest", "-v", "--tb=short", "-rs", "-p", "no:cacheprovider")
PLAYED = "played device"
"""What a device that the CPU plays (tests/device/runtime/) calls itself."""
WHAT_IS_THERE = """
import torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(count)
print(torch.cuda.get_device_name(0) if count else "no CUDA device", torch.__version__, torch.version.cuda, sep="; ")
"""


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    seconds: int
    """The step is killed after this time."""
    shown_by: tuple[str, ...]
    """Regular expressions that match lines of its log if the step did something."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    step: Step
    status: str
    seconds: float = 0
    last_line: str = ""

    @property
    def not_run(self) -> bool:
        return self.status.startswith("not run")

    @property
    def failed(self) -> bool:
        return self.status != "passed" and not self.not_run


@dataclass(frozen=True)
class Session:
    build: Path
    logs: Path
    small: bool
    """Whether each step runs only a small row of its tests."""
    device: str
    devices: int
    deadline: float

    def unit(self, name: str, chosen: str, seconds: int, small: str) -> Step:
        command = (str(self.build / "tests" / name), f"--gtest_filter={small if self.small else chosen}")
        return Step(name, command, seconds, (r"^\[  PASSED  \] [1-9]\d* test",))

    def python_test(self, name: str, seconds: int, small: str, *arguments: str, folder: str = "python") -> Step:
        chosen = ("-k", small) if self.small else arguments
        return Step(name, (*PYTEST, str(ROOT / "tests" / folder / f"{name}.py"), *chosen), seconds, (r"[1-9]\d* passed",))

    def keeps_figures(self) -> bool:
        return not self.small and not self.device.startswith(PLAYED)


def tests(session: Session) -> list[Step]:
    bytelm = (str(session.build / "examples/bytelm"), "--device", "cuda", "--steps", "3" if session.small else "50", "--data",
              str(ROOT / "docs"), "--sample", "0", "--chart", str(session.logs / "bytelm.svg"))  # fmt: skip
    steps = [
        session.python_test("test_optim_cuda", 300, "test_is_the_cpus_step and AdamW and not masters and float32"),
        session.python_test("test_shard_cuda", 300, "test_collectives_and_messages_on_a_device"),
        session.python_test("test_checkpoint_cuda", 300, "test_a_checkpointed_call_is_the_plain_one"),
        session.python_test("test_ledger_cuda", 100, "older"),
        session.python_test("test_bytelm_cuda", 300, "too_small and cpp"),
        session.unit("optim_test", "*", 200, "Optim.OnADeviceBitForBit"),
        session.unit("ledger_test", "*", 200, "*Cuda*"),
        session.unit("count_nonfinite_test", "*", 200, "*CudaEqualsTheReference/float16"),
        session.unit("top_k_cuda_test", "*", 200, "*Nothing*"),
        session.unit("shard_test", "*OnADevice*", 200, "ShardDelayed.OnADevice*"),
        Step("bytelm", bytelm, 200, (r"^model: .* on cuda", r"^validation: ")),
    ]
    if session.devices > 1:
        steps += [session.python_test("test_shard_nccl", 300, "0-reef and not 10-reef", folder="device")]
    return steps


def sanitizer(session: Session) -> list[Step]:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

    def under(check: str, step: Step) -> Step:
        return replace(step, name=f"{check} {step.name}", seconds=300, shown_by=(*step.shown_by, "SUMMARY: 0 (errors|hazards)"),
                       command=(tool, f"--tool={check}", "--error-exitcode=9", *step.command))  # fmt: skip

    few = "test_is_the_cpus_step and AdamW and not masters and "
    kernels = session.python_test("test_optim_cuda", 300, few + "int4", "-k", few + "(float32 or int4)")
    without_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a write behind a tensor stays inside a segment
    counts = session.unit("count_nonfinite_test", "*Cuda*:*Device*", 300, "*CudaEqualsTheReference/float16")
    largest = session.unit("top_k_cuda_test", "*Much*:*Nothing*", 300, "*Nothing*")
    return [
        under("memcheck", replace(kernels, environment=without_cache)),
        under("racecheck", kernels),
        under("synccheck", kernels),
        under("memcheck", counts),
        under("memcheck", largest),
        under("racecheck", largest),
    ]


def budgets(session: Session) -> list[Step]:
    steps = [
        session.unit("budget_test", "Cuda/*", 400, "Cuda/*/lstm"),
        session.python_test("test_budget_cuda", 300, "test_a_cap_ends_with_its_budget"),
    ]
    if session.devices > 1:
        steps += [session.python_test("test_budget_nccl", 300, "1-reef", folder="device")]
    return steps


def benchmarks(session: Session) -> list[Step]:
    results = ROOT / "benchmarks/RESULTS.md" if session.keeps_figures() else session.logs / "RESULTS.md"
    run = (sys.executable, str(ROOT / "benchmarks/run.py"), "--build", str(session.build), "--only", "_cuda$",
           "--results", str(results), *(("--small",) if session.small else ()))  # fmt: skip
    return [Step("benchmarks", run, 600, (r'^\{"name": "GPT-2 small', r'^\{"name": "one tensor/reef'))]


def profile(session: Session) -> list[Step]:
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    counters = ("launch__registers_per_thread,sm__warps_active.avg.pct_of_peak_sustained_active,"
                "dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum")  # fmt: skip
    elements = 1 << (12 if session.small else 26)
    program = (
        "import torch, reef\n"
        "for state in reef.optim.STATES:\n"
        f"    p = torch.nn.Parameter(torch.randn({elements}, device='cuda')); p.grad = torch.randn_like(p)\n"
        "    step = reef.optim.AdamW([p], lr=1e-4, state=state).step\n"
        "    step(); step()\n"
    )
    command = (ncu, "--clock-control", "none", "--metrics", counters, "-k", "regex:step", sys.executable, "-c", program)
    return [Step("profile", command, 200, ("launch__registers_per_thread +register",))]


GROUPS = {"tests": (tests, 5), "sanitizer": (sanitizer, 4), "budgets": (budgets, 2), "benchmarks": (benchmarks, 1),
          "profile": (profile, 1)}  # fmt: skip
"""For each group, its steps, and how many of them run at the same time."""


def environment_for(build: Path) -> dict[str, str]:
    folders = (build / "python", ROOT / "tests/python", ROOT / "tests/support")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "REEF_BUILD_DIR": str(build),
            "CUBLAS_WORKSPACE_CONFIG": ":16:8"}  # fmt: skip


def what_is_there(build: Path) -> tuple[int, str]:
    """Returns the number of devices, and a description of the first one."""
    found = subprocess.run([sys.executable, "-c", WHAT_IS_THERE], env=environment_for(build), capture_output=True, text=True,
                           timeout=300, check=False)  # fmt: skip
    if found.returncode != 0:
        return 0, found.stderr.strip().splitlines()[-1]
    count, words = found.stdout.splitlines()[-2:]
    return int(count), words


def ended_within(step: Step, seconds: float, build: Path, log: Path) -> str:
    with log.open("w") as out:
        try:
            process = subprocess.Popen(step.command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       env=environment_for(build) | step.environment, cwd=ROOT / "tests",
                                       start_new_session=True)  # fmt: skip
        except FileNotFoundError as error:
            return f"not run: no {Path(error.filename).name}"
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it started
            process.wait()
            return f"ended after {seconds:.0f} s"
    return "passed" if code == 0 else f"failed ({code})"


def run(step: Step, session: Session) -> Outcome:
    begin = time.monotonic()
    if begin >= session.deadline:
        return Outcome(step, "not run: no time was left")
    log = session.logs / (step.name.replace(" ", "-") + ".log")
    status = ended_within(step, min(step.seconds, session.deadline - begin), session.build, log)
    text = log.read_text(errors="replace")
    missing = [pattern for pattern in step.shown_by if not re.search(pattern, text, re.MULTILINE)]
    if status == "passed" and missing:
        status = f"not run: nothing in its log is like {missing[0]}"
    lines = [line for line in text.splitlines() if line.strip()]
    return Outcome(step, status, time.monotonic() - begin, lines[-1][:100] if lines else "")


def counted(outcomes: list[Outcome]) -> list[str]:
    """Returns a line that counts the steps that passed, and a line each that names the failed ones and those not run."""
    lines = [f"{sum(outcome.status == 'passed' for outcome in outcomes)} of {len(outcomes)} passed"]
    for words, chosen in (("failed", [o for o in outcomes if o.failed]), ("not run", [o for o in outcomes if o.not_run])):
        if chosen:
            lines.append(f"{words}: " + ", ".join(outcome.step.name for outcome in chosen))
    return lines


def write_summary(session: Session, outcomes: dict[str, list[Outcome]]) -> None:
    rehearsal = "" if session.keeps_figures() else "; a rehearsal"
    lines = [f"# Device session of {datetime.date.today().isoformat()}", "", f"Devices: {session.devices}; {session.device}{rehearsal}", ""]
    lines += [f"- {line}" for line in counted([outcome for group in outcomes.values() for outcome in group])]
    lines += ["", "| group | step | seconds | status | last line |", "| --- | --- | ---: | --- | --- |"]
    for name, group in outcomes.items():
        for o in group:
            cells = (name, o.step.name, f"{o.seconds:.0f}", o.status, o.last_line)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    written = session.logs / "summary.md.written"
    written.write_text("\n".join(lines) + "\n")
    written.replace(session.logs / "summary.md")  # whole at any time, whenever the machine is taken away


def run_groups(session: Session, groups: dict[str, tuple[Callable[[Session], list[Step]], int]]) -> list[Outcome]:
    steps = {name: steps_of(session) for name, (steps_of, _) in groups.items()}
    outcomes = {name: [Outcome(step, "not run: not reached") for step in group] for name, group in steps.items()}
    write_summary(session, outcomes)
    for name, (_, beside) in groups.items():
        print(f"-- {name}", flush=True)
        with ThreadPoolExecutor(beside) as pool:
            running = {pool.submit(run, step, session): place for place, step in enumerate(steps[name])}
            for future in as_completed(running):
                outcome = outcomes[name][running[future]] = future.result()
                print(f"{outcome.step.name:32} {outcome.seconds:6.0f} s  {outcome.status:20} {outcome.last_line}", flush=True)
                write_summary(session, outcomes)
    return [outcome for group in outcomes.values() for outcome in group]


def exit_code(outcomes: list[Outcome]) -> int:
    if any(outcome.failed for outcome in outcomes):
        return 1
    return 2 if any(outcome.not_run for outcome in outcomes) else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--only", choices=GROUPS, action="append")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    options = parser.parse_args(arguments)
    build = options.build.resolve()
    logs = (options.logs or build / "device-session").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    devices, device = what_is_there(build)
    print(f"-- devices: {devices}; {device}", flush=True)
    session = Session(build, logs, options.rehearse, device, devices, deadline)
    outcomes = run_groups(session, {name: group for name, group in GROUPS.items() if not options.only or name in options.only})
    print(*counted(outcomes), f"logs and summary.md in {logs}", sep="\n")
    return exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
