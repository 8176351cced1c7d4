#!/usr/bin/env python3
"""Runs a command as N ranks on this host, and says which rank failed first.

    ranks.py --ranks 3 --deadline 60 -- ./program --with arguments

Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR=127.0.0.1 and the same free MASTER_PORT. When a rank fails, the
others get a few seconds to notice by themselves; what is left then, and what is left at the deadline, is killed with
all the processes it started. Every rank always runs to an end. The exit code is 0 if all of them exit with 0.
"""

import argparse
import concurrent.futures
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import preloaded

HANG_SECONDS, GRACE_SECONDS = 900, 300
"""What hangs is ended then: several times what a slow machine needs with other work beside it."""
TAIL_LINES = 40
FAILURE_LINES = 8
FAILURE = re.compile(r": Failure$|^Traceback|^terminate called|^==\d+==ERROR")
POLL_SECONDS = 0.02
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_",
             "MPI_LOCALRANKID", "SLURM_")


@dataclass
class RankResult:
    rank: int
    output: str  # standard output and error, as they came
    exit_code: int | None  # None: ended by a signal
    signal: int | None
    seconds: float  # from the start of the first rank to the end of this one
    stopped_by: str | None  # why it was killed by us: "grace", "deadline" or "plan"; None: it ended by itself

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def how(self) -> str:
        if self.stopped_by == "deadline":
            return "still ran at the deadline"
        if self.stopped_by == "grace":
            return "still ran after the others failed"
        if self.signal is not None:
            name = signal.Signals(self.signal).name
            return f"was ended by {name}" + (" as planned" if self.stopped_by == "plan" else "")
        return f"exited with {self.exit_code}"

    def excerpt(self) -> list[str]:
        """The last lines, and before them those of the first failure if it is further up."""
        lines = self.output.splitlines()
        end = max(len(lines) - TAIL_LINES, 0)
        first = next((i for i in range(end) if FAILURE.search(lines[i])), None)
        if first is None:
            return lines[end:]
        above = lines[first:min(first + FAILURE_LINES, end)]
        return [*above, "...", *lines[end:]] if first + FAILURE_LINES < end else above + lines[end:]


@dataclass
class Result:
    ranks: list[RankResult]

    @property
    def ok(self) -> bool:
        return all(rank.ok for rank in self.ranks)

    @property
    def first_failure(self) -> RankResult | None:
        """The rank that failed by itself before any other did; one that we stopped only if there is no such rank."""
        failed = [rank for rank in self.ranks if not rank.ok]
        return min(failed, key=lambda r: (r.stopped_by in ("grace", "deadline"), r.seconds), default=None)

    def report(self) -> str:
        """What each failed rank said of its first failure and at its end, then which of them failed first."""
        lines = []
        for rank in self.ranks:
            if not rank.ok:
                lines += [f"---- rank {rank.rank} {rank.how}", *rank.excerpt()]
        first = self.first_failure
        if first is None:
            lines.append(f"all {len(self.ranks)} ranks exited with 0")
        else:
            lines.append(f"rank {first.rank} of {len(self.ranks)} failed first: it {first.how} "
                         f"after {first.seconds:.1f} s")
        return "\n".join(lines)


class ReservedPort:
    """A port that nobody listens on, and that no other test of this machine has reserved: of two that asked the system for
    a free one at the same time, both could get the same. Reserved by a socket's name, which goes with the object."""

    BELOW_OUTGOING = range(20000, 32768)  # the system gives the higher ones to whoever connects

    def __init__(self) -> None:
        for self.number in random.SystemRandom().sample(self.BELOW_OUTGOING, 1000):
            self._reserved = socket.socket(socket.AF_UNIX)
            try:
                self._reserved.bind(f"\0reef-test-port-{self.number}")
                with socket.socket() as probe:
                    # A process that another thread starts just now has this socket, too, for a moment.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", self.number))
                return
            except OSError:
                self._reserved.close()
        raise OSError("no port is free")

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *exception: object) -> None:
        self._reserved.close()


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Ours without what another launcher may have left in it, and the variables of this rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return kept | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                   preloaded.ENDS_AT_ONCE: "1" if rank > 0 else ""}  # one of them shows how an interpreter ends


def start_rank(command: list[str], env: dict[str, str], output) -> subprocess.Popen | preloaded.Forked:
    if preloaded.can_fork(command[0]):
        return preloaded.start(command, env, output)
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                            start_new_session=True, preexec_fn=preloaded.yield_to_senders)


def run_ranks(command: list[str], ranks: int, deadline: float = HANG_SECONDS, grace: float = GRACE_SECONDS,
              kill: dict[int, float] | None = None, env: dict[str, str] | None = None,
              rank_env: dict[int, dict[str, str]] | None = None) -> Result:
    """Runs `command` as `ranks` ranks for at most `deadline` seconds. A program in Python (program.py), and one in
    C++ of the build under test, is forked from a process that has begun already (preloaded.py).

    `grace`: seconds that the others have to end after the first failure. `kill`: rank -> seconds after which it is
    killed on purpose (SIGKILL). `env` is added to every rank's environment, `rank_env` to that of single ranks.
    """
    with ReservedPort() as port:
        return run_ranks_at(port, command, ranks, deadline, grace, dict(kill or {}), env or {}, rank_env or {})


def run_ranks_at(port: int, command: list[str], ranks: int, deadline: float, grace: float, kill: dict[int, float],
                 env: dict[str, str], rank_env: dict[int, dict[str, str]]) -> Result:
    start = time.monotonic()
    processes: list[subprocess.Popen | preloaded.Forked] = []
    outputs = [tempfile.TemporaryFile() for _ in range(ranks)]
    ended: dict[int, float] = {}
    stopped: dict[int, str] = {}
    try:
        for rank in range(ranks):
            variables = environment(rank, ranks, port) | env | rank_env.get(rank, {})
            processes.append(start_rank(command, variables, outputs[rank]))
        failed_at = None
        while len(ended) < ranks:
            now = time.monotonic() - start
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = now
                    if process.returncode != 0 and failed_at is None:
                        failed_at = now
            why = ("deadline" if now > deadline else
                   "grace" if failed_at is not None and now > failed_at + grace else None)
            for rank, process in enumerate(processes):
                planned = now > kill.get(rank, float("inf"))
                if rank not in ended and rank not in stopped and (why or planned):
                    stopped[rank] = why or "plan"
                    preloaded.kill_group(process)
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:  # also what a rank left behind, and all of it when we are interrupted
            preloaded.kill_group(process)
            process.wait()

    results = []
    for rank, process in enumerate(processes):
        outputs[rank].seek(0)
        code = process.returncode
        results.append(RankResult(rank=rank, output=outputs[rank].read().decode(errors="replace"),
                                  exit_code=code if code >= 0 else None, signal=-code if code < 0 else None,
                                  seconds=ended[rank], stopped_by=stopped.get(rank)))
        outputs[rank].close()
    return Result(results)


def beside_each_other(run_one, rows: list) -> dict:
    """What `run_one(row)` returns for each row. All run at once: for rows whose ranks mostly wait."""
    with concurrent.futures.ThreadPoolExecutor(len(rows)) as threads:
        return dict(zip(rows, threads.map(run_one, rows), strict=True))


def planned_kill(text: str) -> tuple[int, float]:
    rank, _, seconds = text.partition(":")
    return int(rank), float(seconds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--deadline", type=float, default=HANG_SECONDS, help=f"seconds for the whole run (default {HANG_SECONDS})")
    parser.add_argument("--grace", type=float, default=GRACE_SECONDS,
                        help=f"seconds for the others after a failure (default {GRACE_SECONDS})")
    parser.add_argument("--kill", type=planned_kill, action="append", default=[], metavar="RANK:SECONDS",
                        help="kill this rank after so many seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- program and its arguments")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command: write it after --")
    if options.ranks < 1:
        parser.error("--ranks must be at least 1")
    result = run_ranks(command, options.ranks, options.deadline, options.grace, dict(options.kill))
    if result.ok:
        print(result.ranks[0].output, end="")
    print(result.report())
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
