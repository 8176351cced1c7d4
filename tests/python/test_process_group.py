"""The process group among real processes that fail, die, hang and disagree: tests/distributed/rank_probe.cpp is each
rank. No test here measures time; the deadline of run_ranks is what a hang runs into."""

import os
import re
import socket
import subprocess
import sys

import pytest
from ranks import HANG_SECONDS, ReservedPort, beside_each_other, run_ranks
from waits import HEARTBEAT_SECONDS, SHORT_SECONDS, STOPPED_SECONDS

RANK_FAILED, GROUP_FAILED, CONFIG_ERROR = 10, 11, 12


@pytest.fixture(scope="session")
def probe(build_dir) -> str:
    return str(build_dir / "tests" / "rank_probe")


def run(probe, ranks, *arguments, **options):
    result = run_ranks([probe, *map(str, arguments)], ranks, **options)
    assert not [rank for rank in result.ranks if rank.stopped_by in ("deadline", "grace")], result.report()
    return result


def said(rank, kind) -> str:
    """The sentence that `rank` ended with."""
    lines = [line for line in rank.output.splitlines() if line.startswith(kind)]
    assert len(lines) == 1, rank.output
    return lines[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3])
def test_ranks_come_up(probe, ranks, groups):
    result = run(probe, ranks, "--groups", groups)
    assert result.ok, result.report()
    for rank in result.ranks:
        assert rank.output.splitlines() == [f"up: rank {rank.rank} of {ranks}"] * groups + ["done"]


def test_ranks_meet_in_a_file(probe, tmp_path):
    result = run(probe, 2, "--store", f"file://{tmp_path}/meet")
    assert result.ok, result.report()
    assert list(tmp_path.iterdir()) == []


def test_no_launcher_means_a_world_of_one(probe):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    done = subprocess.run([probe], env=clean, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
    assert done.stdout == "up: rank 0 of 1\ndone\n"


@pytest.mark.parametrize(("way", "ranks", "victim", "elements"), [
    ("--kill", 2, 0, 1000), ("--kill", 2, 1, 1000), ("--kill", 3, 0, 1000), ("--kill", 3, 1, 1000),
    ("--kill", 3, 2, 1000), ("--kill", 4, 2, 3_000_000), ("--kill", 4, 0, 3_000_000), ("--leave", 3, 0, 1000),
    ("--leave", 3, 1, 1000), ("--throw", 3, 0, 1000), ("--throw", 3, 2, 3_000_000),
])  # fmt: skip
def test_survivors_name_the_rank_that_is_gone(probe, way, ranks, victim, elements):
    result = run(probe, ranks, way, f"{victim}:1", "--elements", elements)
    for rank in result.ranks:
        if rank.rank != victim:
            assert rank.exit_code == RANK_FAILED, result.report()
            text = said(rank, "RankFailed")
            assert text.startswith(f"RankFailed {victim}: rank {rank.rank} of {ranks}: reef::all_reduce failed: "
                                   f"rank {victim} (process "), text
            assert f"on host {socket.gethostname()}" in text


def test_survivors_of_two_deaths_agree(probe):
    result = run(probe, 4, "--kill", "1:1", "--leave", "3:1")
    named = {said(result.ranks[rank], "RankFailed").split(":")[0] for rank in (0, 2)}
    assert len(named) == 1 and named <= {"RankFailed 1", "RankFailed 3"}


STOPPED = [(2, 1), (3, 0), (3, 1), (6, 4)]  # ranks, victim; rank 0 serves the store, which then answers no more
BEATS = ("--heartbeat-ms", 1000 * HEARTBEAT_SECONDS)
SHORT = ("--timeout-ms", 1000 * SHORT_SECONDS)
LATE = ("--late", f"1:{2000 * SHORT_SECONDS}")
WAITS = {
    **{(ranks, victim): (ranks, ("--stop", f"{victim}:1", "--stop-ms", 1000 * STOPPED_SECONDS, *BEATS))
       for ranks, victim in STOPPED},
    "late": (3, (*LATE, *BEATS)),
    "too late": (3, (*LATE, *SHORT)),
}  # fmt: skip


@pytest.fixture(scope="module")
def waits(probe):
    """What mostly waits runs at once."""
    return beside_each_other(lambda row: run(probe, WAITS[row][0], *WAITS[row][1]), list(WAITS))


# The ranks wait in a collective of gloo's own.
@pytest.mark.parametrize(("ranks", "victim"), STOPPED)
def test_a_rank_that_is_stopped_is_named(waits, ranks, victim):
    result = waits[ranks, victim]
    for rank in result.ranks:
        if rank.rank != victim:
            text = said(rank, f"RankFailed {victim}")
            assert f"reef::all_reduce failed: rank {victim} (process " in text and "it is stopped" in text, text
    # When it goes on, the others are gone.
    assert re.search(r"is gone|cannot be reached", said(result.ranks[victim], "RankFailed")), result.report()


def test_a_rank_that_computes_for_longer_than_the_heartbeat_is_alive(waits):
    result = waits["late"]
    assert result.ok, result.report()


def test_a_rank_that_does_not_come_to_the_collective_is_pointed_at(waits):
    result = waits["too late"]
    for rank in (0, 2):
        text = said(result.ranks[rank], "RankFailed -1")
        assert "no rank's process is known to have ended" in text and "all but rank 1" in text, text
    assert result.ranks[1].exit_code == RANK_FAILED, result.report()


def test_ranks_that_disagree_on_the_tensor_all_refuse(probe):
    result = run(probe, 3, "--elements-on-rank", "1:999")
    for rank in result.ranks:
        assert rank.exit_code == CONFIG_ERROR, result.report()
        assert "999 elements" in said(rank, "ConfigError") and "1000 elements" in said(rank, "ConfigError")


def all_say(result, ranks, pattern):
    for rank in ranks:
        assert result.ranks[rank].exit_code == GROUP_FAILED, result.report()
        text = said(result.ranks[rank], f"ProcessGroupError {result.ranks[rank].rank}")
        assert re.search(pattern, text), text


def test_two_processes_that_claim_one_rank_are_refused(probe):
    result = run(probe, 3, rank_env={2: {"RANK": "1"}})
    for rank in result.ranks:
        assert rank.exit_code == GROUP_FAILED, result.report()
        assert re.search(r"rank 1 of 3 is claimed twice, by process \d+ on host .* and process \d+", rank.output)


def test_world_sizes_that_differ_are_refused(probe):
    result = run(probe, 3, rank_env={2: {"WORLD_SIZE": "4"}})
    all_say(result, (0, 1, 2), "was started for a world of [34], others for a world of [34]")


def test_a_rank_that_never_starts_is_named_by_all(probe):
    result = run(probe, 4, *SHORT, rank_env={1: {"RANK": "9"}, 3: {"WORLD_SIZE": "x"}})
    assert [result.ranks[rank].exit_code for rank in (1, 3)] == [CONFIG_ERROR, CONFIG_ERROR]
    all_say(result, (0, 2), r"ranks 1 and 3 of 4 did not check in at tcp://127.0.0.1:\d+ within 20 s")


def test_the_reason_of_one_rank_is_the_reason_of_all(probe):
    result = run(probe, 3, rank_env={1: {"GLOO_SOCKET_IFNAME": "nope0"}})
    all_say(result, (0, 1, 2), r"rank 1 of 3 \(process \d+ on host .*\) could not join .* interface 'nope0'")


def test_a_port_in_use_and_a_store_that_is_not_there(probe):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = {"MASTER_PORT": str(taken.getsockname()[1])}
        result = run(probe, 2, *SHORT, env=port)
    assert "is in use on this host" in said(result.ranks[0], "ProcessGroupError 0")
    assert "did not answer as a store" in said(result.ranks[1], "ProcessGroupError 1")


def test_a_file_left_by_an_earlier_run_serves_the_next(probe, tmp_path):
    store = f"file://{tmp_path}/meet"
    assert not run(probe, 2, "--store", store, "--kill", "0:0", "--leave", "1:0").ok
    assert (tmp_path / "meet").exists()
    for ranks in (2, 3):
        result = run(probe, ranks, "--store", store)
        assert result.ok, result.report()


def torchrun(probe, *arguments, options=()):
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK", "TORCHELASTIC_"))}
    with ReservedPort() as port:
        command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2",
                   "--master-port", str(port), *options, probe, *map(str, arguments)]
        return subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                              check=False, timeout=HANG_SECONDS)


def test_torchrun_starts_a_plain_binary(probe):
    done = torchrun(probe)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["done", "done", "up: rank 0 of 2", "up: rank 1 of 2"]


def test_torchrun_restarts_do_not_read_what_the_first_attempt_left(probe, tmp_path):
    """The first attempt dies with its keys in the agent's store, which lives on."""
    script = tmp_path / "rank.sh"
    script.write_text(f"#!/bin/bash\ncase $TORCHELASTIC_RESTART_COUNT in\n"
                      f"0) exec {probe} --throw 0:1 ;;\n*) exec {probe} ;;\nesac\n")
    script.chmod(0o755)
    done = torchrun(str(script), options=["--max-restarts", "1"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no more data") == 1 and done.stdout.count("done") == 2
