"""tests/support/ranks.py itself: it must tell which rank failed first, and leave nothing running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest
from ranks import HANG_SECONDS, run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "support" / "ranks.py")


def python(source: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + source]


def alive(pid: int) -> bool:
    """Whether `pid` runs: a process that has ended may stay in the table until its parent asks for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_every_rank_gets_its_place():
    result = run_ranks(python("print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))\n"
                              "print(os.environ['MASTER_PORT'])"), 3)
    assert result.ok and result.first_failure is None
    lines = [rank.output.splitlines() for rank in result.ranks]
    assert [first for first, _ in lines] == [f"{rank} {rank} 3 127.0.0.1" for rank in range(3)]
    assert len({port for _, port in lines}) == 1
    assert result.report() == "all 3 ranks exited with 0"


def test_what_another_launcher_left_does_not_reach_the_ranks(monkeypatch):
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.setenv(name, "1")
    result = run_ranks(python("assert not [n for n in os.environ if n.startswith(('TORCHELASTIC', 'OMPI', 'SLURM', 'PMI'))]"), 2)
    assert result.ok, result.report()


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_rank_that_fails_first_is_named_and_not_those_it_takes_along(culprit):
    source = (f"if rank == {culprit}:\n    print('cannot go on')\n    sys.exit(7)\n"
              "time.sleep(0.5)\nprint('lost a peer')\nsys.exit(9)")
    result = run_ranks(python(source), 3)
    assert not result.ok
    assert (result.first_failure.rank, result.first_failure.exit_code) == (culprit, 7)
    report = result.report()
    assert report.splitlines()[-1].startswith(f"rank {culprit} of 3 failed first: it exited with 7")
    assert "cannot go on" in report and report.count("lost a peer") == 2


@pytest.mark.parametrize("lines_after", [0, 20, 200])
def test_what_failed_is_told_however_much_was_said_later(lines_after):
    source = ("print('filler\\n' * 100)\nprint('a_test.cpp:7: Failure\\nExpected: 3 vs 4')\n"
              f"print('went on\\n' * {lines_after})\nprint('1 FAILED TEST')\nsys.exit(1)")
    report = run_ranks(python(source), 1).report()
    assert report.count("a_test.cpp:7: Failure\nExpected: 3 vs 4") == 1
    assert "1 FAILED TEST" in report and len(report.splitlines()) < 60


def test_a_signal_is_named():
    result = run_ranks(python("if rank == 1:\n    os.kill(os.getpid(), signal.SIGSEGV)"), 2)
    assert result.first_failure.signal == signal.SIGSEGV and result.first_failure.exit_code is None
    assert "rank 1 of 2 failed first: it was ended by SIGSEGV" in result.report()


def test_ranks_that_do_not_notice_a_failure_are_stopped_after_the_grace():
    result = run_ranks(python("sys.exit(3) if rank == 0 else time.sleep(600)"), 3, deadline=60, grace=0.3)
    assert [rank.stopped_by for rank in result.ranks] == [None, "grace", "grace"]
    assert result.first_failure.rank == 0


def test_the_deadline_ends_all_and_names_the_ranks_that_hang():
    result = run_ranks(python("time.sleep(600 if rank == 1 else 0)"), 2, deadline=15)
    assert result.ranks[0].ok and result.ranks[1].stopped_by == "deadline"
    assert "rank 1 of 2 failed first: it still ran at the deadline" in result.report()


def test_what_a_rank_started_goes_with_it(tmp_path):
    source = (f"import subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
              f"open(r'{tmp_path}/' + str(rank), 'w').write(str(child.pid))\n"
              f"while not (os.path.exists(r'{tmp_path}/0') and os.path.getsize(r'{tmp_path}/0')):\n"
              "    time.sleep(0.02)\n"
              "if rank == 1:\n"
              "    sys.exit(3)\n"
              "time.sleep(600)")
    run_ranks(python(source), 2, grace=0.3)
    children = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for _ in range(100):
        if not any(map(alive, children)):
            break
        time.sleep(0.02)
    assert not any(map(alive, children))


def test_a_planned_kill_is_told_from_a_failure():
    result = run_ranks(python("time.sleep(600 if rank == 1 else 0)"), 2, deadline=60, kill={1: 0.2})
    assert result.ranks[1].stopped_by == "plan" and result.ranks[1].signal == signal.SIGKILL
    assert "was ended by SIGKILL as planned" in result.report()


def test_single_ranks_get_variables_of_their_own():
    result = run_ranks(python("print(os.environ['A'] + os.environ['B'])"), 2, env={"A": "a", "B": "b"},
                       rank_env={1: {"B": "c"}})
    assert [rank.output.strip() for rank in result.ranks] == ["ab", "ac"]


def test_a_command_that_does_not_exist_leaves_no_rank_behind():
    with pytest.raises(FileNotFoundError):
        run_ranks(["/no/such/program"], 2)


def test_output_that_fills_a_pipe_does_not_stop_a_rank():
    result = run_ranks(python("print('x' * 1_000_000)"), 2)
    assert result.ok and len(result.ranks[1].output) == 1_000_001


@pytest.mark.parametrize(("arguments", "code", "last_line"), [
    (["--ranks", "2", "--", "true"], 0, "all 2 ranks exited with 0"),
    (["--ranks", "2", "--", "false"], 1, "failed first: it exited with 1"),
    (["--ranks", "1", "--deadline", "0.5", "--", "sleep", "600"], 1, "still ran at the deadline"),
    (["--ranks", "1", "--kill", "0:0.1", "--", "sleep", "600"], 1, "was ended by SIGKILL as planned"),
    (["--ranks", "2", "--"], 2, "no command"),
    (["--ranks", "0", "--", "true"], 2, "at least 1"),
])
def test_the_program(arguments, code, last_line):
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert done.returncode == code
    assert last_line in (done.stdout + done.stderr).splitlines()[-1]


def test_an_interrupt_ends_the_ranks(tmp_path):
    source = f"open(r'{tmp_path}/' + str(rank), 'w').write(str(os.getpid()))\ntime.sleep(600)"
    runner = subprocess.Popen([sys.executable, PROGRAM, "--ranks", "2", "--", *python(source)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    files = [tmp_path / "0", tmp_path / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert runner.poll() is None
        time.sleep(0.02)
    runner.send_signal(signal.SIGINT)
    runner.wait(timeout=HANG_SECONDS)
    assert not any(alive(int(file.read_text())) for file in files)
    assert runner.returncode != 0


HANGS = """
import os, subprocess, time
print(os.getpid(), subprocess.Popen(["sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""


def test_a_preloaded_program_that_hangs_is_ended_with_what_it_started(tmp_path):
    (tmp_path / "ends.py").touch()
    (tmp_path / "hangs.py").write_text(HANGS)
    with open(tmp_path / "output", "w+b") as output:
        preloaded.run([str(tmp_path / "ends.py")], dict(os.environ), output, HANG_SECONDS)  # all is imported now
        with pytest.raises(subprocess.TimeoutExpired):
            preloaded.run([str(tmp_path / "hangs.py")], dict(os.environ), output, timeout_seconds=10)
        output.seek(0)
        pids = [int(word) for word in output.read().split()]
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


def test_a_preloaded_program_ends_with_the_process_that_asked_for_it(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    asks = ("import os, sys, time, preloaded\n"
            "with open('output', 'w') as output:\n"
            "    program = preloaded.start(['hangs.py'], dict(os.environ), output)\n"
            "while not open('output').read().endswith('\\n'):\n"
            "    time.sleep(0.02)\n"
            "os.kill(os.getpid(), 9)")
    environment = os.environ | {"PYTHONPATH": f"{Path(PROGRAM).parent}:{os.environ['PYTHONPATH']}"}
    subprocess.run([sys.executable, "-c", asks], cwd=tmp_path, env=environment, check=False, timeout=HANG_SECONDS)
    pids = [int(word) for word in (tmp_path / "output").read_text().split()]
    deadline = time.monotonic() + HANG_SECONDS
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("line", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("1 / 0", 1)])
def test_a_preloaded_program_is_as_started_by_itself(tmp_path, line, code):
    (tmp_path / "program.py").write_text(
        "import os, sys\nprint(sys.argv, os.environ['NAME'], os.getcwd(), flush=True)\n" + line)
    with open(tmp_path / "out", "w+b") as out, open(tmp_path / "err", "w+b") as err:
        command = [str(tmp_path / "program.py"), "a word", ""]
        environment = {"NAME": "some=thing"}
        assert preloaded.run(command, environment, out, HANG_SECONDS, stderr=err, cwd=str(tmp_path)) == code
        out.seek(0)
        err.seek(0)
        assert out.read().decode() == f"{command} some=thing {tmp_path}\n"
        assert ("ZeroDivisionError" in err.read().decode()) == (code == 1)
