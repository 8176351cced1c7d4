"""tests/device_session.py, rehearsed on a played device, with stand-ins for compute-sanitizer and ncu: what it names is there,
what it starts runs, and its summary tells what has passed, what failed and what was not run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from played_device import PLAYED

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("REEF_BUILD_DIR", "build")).resolve()
sys.path.insert(0, str(ROOT / "tests"))

import device_session  # noqa: E402
from device_session import GROUPS, Session, Step, counted, exit_code, run_groups  # noqa: E402

pytestmark = pytest.mark.skipif(not PLAYED, reason="needs a played CUDA device")

SANITIZER = """#!/bin/sh
echo "compute-sanitizer $1 without_cache=$PYTORCH_NO_CUDA_MEMORY_CACHING" >>"$CALLS"
case $1 in
  --tool=memcheck | --tool=synccheck) summary="ERROR SUMMARY: 0 errors" ;;
  --tool=racecheck) summary="RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
  *) exit 64 ;;
esac
[ "$2" = --error-exitcode=9 ] || exit 64
shift 2
"$@" || exit $?
echo "========= $summary"
"""
NCU = """#!/bin/sh
echo "ncu $1 $2 $3 $5 $6" >>"$CALLS"
shift 6
"$@" || exit $?
echo "    launch__registers_per_thread             register/thread           64"
"""


def session_of(logs, small=False, device=device_session.PLAYED, deadline=float("inf")):
    return Session(BUILD, Path(logs), small, device, 2, deadline)


class Collected:
    count = 0

    def pytest_collection_finish(self, session):
        self.count = len(session.items)


def selected(command):
    """How many tests a step's command chooses."""
    if "pytest" in command:
        collected = Collected()
        chosen = command[command.index("pytest") + 1 :]
        pytest.main([*chosen, "--collect-only", "-q"], plugins=[collected])
        return collected.count
    program, chosen = command[-2:]
    listed = subprocess.run([program, chosen, "--gtest_list_tests"], capture_output=True, text=True, timeout=300, check=True)
    return sum(line.startswith("  ") for line in listed.stdout.splitlines())


@pytest.mark.parametrize("small", [False, True])
def test_each_step_chooses_tests_that_there_are(small, tmp_path):
    session = session_of(tmp_path, small)
    steps = [step for group in ("tests", "sanitizer", "budgets") for step in GROUPS[group][0](session) if step.name != "bytelm"]
    counts = {step.name: selected(step.command) for step in steps}
    assert len(counts) == len(steps) and all(counts.values()), counts
    if small:
        assert all(count <= 4 for count in counts.values()), counts


def test_the_rehearsal_runs_all_and_keeps_no_figure(tmp_path):
    for name, program in (("compute-sanitizer", SANITIZER), ("ncu", NCU)):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    results = ROOT / "benchmarks/RESULTS.md"
    before, logs = results.read_bytes(), tmp_path / "logs"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    line = [sys.executable, str(ROOT / "tests/device_session.py"), str(BUILD), "--rehearse", "--logs", str(logs), "--minutes", "25"]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    summary = (logs / "summary.md").read_text()
    assert ended.returncode == 0, ended.stdout + ended.stderr + "".join(log.read_text() for log in logs.glob("*.log"))

    steps = [step for steps_of, _ in GROUPS.values() for step in steps_of(session_of(logs, small=True))]
    assert f"\n- {len(steps)} of {len(steps)} passed\n" in summary and "played device" in summary and "a rehearsal" in summary
    assert f"\n{len(steps)} of {len(steps)} passed\n" in ended.stdout
    assert len(steps) == len({step.name for step in steps}) == summary.count("| passed |")
    assert {log.stem for log in logs.glob("*.log")} == {step.name.replace(" ", "-") for step in steps}

    assert results.read_bytes() == before
    written = (logs / "RESULTS.md").read_text()
    for section in ("peer budget_cuda", "peer optim_steps_cuda"):
        assert f"## {section}\n" in written
    assert "played device" in written and "GPT-2 small, bf16/budget of 35%" in written and "one tensor/reef int4" in written

    called = sorted((tmp_path / "calls").read_text().splitlines())
    sanitized = [f"compute-sanitizer --tool={check} without_cache={cache}" for check, cache in (
        ("memcheck", ""), ("memcheck", ""), ("memcheck", "1"), ("racecheck", ""), ("racecheck", ""), ("synccheck", ""))]  # fmt: skip
    assert called == [*sanitized, "ncu --clock-control none --metrics -k regex:step"]


def test_what_is_measured_on_a_played_device_is_refused_as_a_result():
    line = [sys.executable, str(ROOT / "benchmarks/run.py"), "--build", str(BUILD), "--only", "_cuda$"]
    for more, words in (([], "a played device"), (["--small"], "tiny sizes")):
        ended = subprocess.run([*line, *more], capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 2 and f"figures of {words} are no measurements" in ended.stderr, ended.stderr


@pytest.mark.parametrize(("device", "small", "kept"), [("NVIDIA H100", False, True), ("NVIDIA H100", True, False),
                                                      ("played device; 2.15", False, False)])  # fmt: skip
def test_one_command_writes_results_on_a_real_device_only(device, small, kept, tmp_path):
    [step] = device_session.benchmarks(session_of(tmp_path, small, device))
    results = ROOT / "benchmarks/RESULTS.md" if kept else tmp_path / "RESULTS.md"
    assert step.command[step.command.index("--results") + 1] == str(results)
    assert ("--small" in step.command) == small


def test_each_way_to_end_is_told(tmp_path):
    skipped = tmp_path / "test_skipped.py"
    skipped.write_text("import pytest\n\ndef test_it():\n    pytest.skip('no device')\n")
    all_skipped = Step("skipped", (*device_session.PYTEST, str(skipped)), 300, (r"[1-9]\d* passed",))
    hangs = ("sh", "-c", f"sleep 1000 & echo $! >{tmp_path}/child; wait")
    first = [
        Step("fine", ("echo", "all | is well"), 100, ("is well",)),
        Step("fails", ("sh", "-c", "echo is well; exit 3"), 100, ("is well",)),
        Step("is killed", ("sh", "-c", "kill -9 $$"), 100, ()),
        Step("hangs", hangs, 2, ()),
        Step("is missing", ("/nonexistent/compute-sanitizer", "x"), 100, ()),
        Step("says nothing", ("true",), 100, ("is well",)),
        Step("reads the summary", ("grep", "later.*not reached", f"{tmp_path}/summary.md"), 100, ("later",)),
        all_skipped,
    ]
    groups = {"first": (lambda session: first, 3), "second": (lambda session: [Step("later", ("true",), 100, ())], 1)}
    outcomes = run_groups(session_of(tmp_path), groups)
    found = {outcome.step.name: outcome.status for outcome in outcomes}
    assert found == {
        "fine": "passed",
        "fails": "failed (3)",
        "is killed": "failed (-9)",
        "hangs": "ended after 2 s",
        "is missing": "not run: no compute-sanitizer",
        "says nothing": "not run: nothing in its log is like is well",
        "reads the summary": "passed",
        "skipped": r"not run: nothing in its log is like [1-9]\d* passed",
        "later": "passed",
    }
    told = ["3 of 9 passed", "failed: fails, is killed, hangs", "not run: is missing, says nothing, skipped"]
    assert counted(outcomes) == told and exit_code(outcomes) == 1
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"\n- {line}\n" in summary for line in told) and "| all \\| is well |" in summary

    child, deadline = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}"), time.monotonic() + 100
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()  # what a step started has ended with it


def test_what_no_time_is_left_for_is_not_run(tmp_path):
    step = Step("late", ("touch", str(tmp_path / "touched")), 100, ())
    outcomes = run_groups(session_of(tmp_path, deadline=time.monotonic()), {"only": (lambda session: [step], 1)})
    assert [outcome.status for outcome in outcomes] == ["not run: no time was left"] and exit_code(outcomes) == 2
    assert not (tmp_path / "touched").exists()
    soon = session_of(tmp_path, deadline=time.monotonic() + 2)
    [outcome] = run_groups(soon, {"only": (lambda session: [Step("long", ("sleep", "1000"), 900, ())], 1)})
    assert outcome.failed and outcome.status.startswith("ended after ") and outcome.seconds < 900


def test_a_missing_package_is_no_device_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(device_session, "WHAT_IS_THERE", "import no_such_package")
    assert device_session.what_is_there(tmp_path) == (0, "ModuleNotFoundError: No module named 'no_such_package'")
