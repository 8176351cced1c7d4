"""Histories of attempts to bring up a group at one address, by real processes (tests/distributed/attempts_probe.cpp is each
rank): who tries when, who fails, who is started anew. Whatever happened before, ranks that try at the same time come up,
and the sums of their groups are right. What fails before says why. No test measures time."""

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from ranks import HANG_SECONDS, POLL_SECONDS, ReservedPort, beside_each_other, environment
from torch.distributed import TCPStore
from waits import SHORT_SECONDS

AT_ONCE = 16
MISSED = f"did not check in at .* within {SHORT_SECONDS} s"


class Process:
    """One rank's."""

    def __init__(self, probe, rank, store, variables):
        self.process = subprocess.Popen([probe, store], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, start_new_session=True)
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        self.rank = rank

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("ended")

    def tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        return self.lines.get(timeout=HANG_SECONDS).strip()

    def says(self, pattern, kind="ProcessGroupError"):
        text = self.hear()
        assert re.search(f"^{kind}: .*{pattern}", text), f"rank {self.rank}: {text}"

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def kill(self):
        if self.process.returncode is None:
            self.signal(signal.SIGKILL)
            self.process.communicate()


def records_of(data: bytes) -> dict[str, str]:
    """Of a FileStore: lengths, keys and values, the last of which counts. Another process may be writing one."""
    records, texts = {}, []
    while len(data) >= 4:
        length = int.from_bytes(data[:4], sys.byteorder)
        texts.append(data[4 : 4 + length].decode(errors="replace"))
        data = data[4 + length :]
        if len(texts) == 2:
            records[texts[0].removeprefix("/")] = texts[1]
            texts = []
    return records


class Job:
    """Ranks that have one address, and a history."""

    def __init__(self, probe, ranks, kind, port, folder):
        self.probe, self.size, self.kind, self.port = probe, ranks, kind, port
        self.path = folder / "meet"
        self.agent, self.started = None, []

    def start_all_anew(self):
        for rank in range(self.size):
            self.start_anew(rank)

    def start_all(self):
        if self.kind == "agent":
            self.agent = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        self.ranks = [self.start(rank) for rank in range(self.size)]
        self.last = self.ranks[-1]

    def start(self, rank):
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        variables = environment(rank, self.size, self.port) | (agent if self.agent else {})
        store = f"file://{self.path}" if self.kind == "file" else ""
        self.started.append(Process(self.probe, rank, store, variables))
        return self.started[-1]

    def start_anew(self, rank):
        self.ranks[rank].kill()
        self.ranks[rank] = self.start(rank)
        self.last = self.ranks[-1]
        return self.ranks[rank]

    def try_it(self, *ranks, seconds=HANG_SECONDS, size=None, interface=""):
        for each in ranks:
            each.tell("try", size or self.size, 1000 * seconds, interface)

    def all_come_up(self, ranks=None):
        ranks = ranks or self.ranks
        self.try_it(*ranks, size=len(ranks))
        self.have_come_up(ranks)

    def have_come_up(self, ranks=None):
        said = [each.hear() for each in ranks or self.ranks]
        assert set(said) == {"done"}, said

    @property
    def others(self):
        """All but the last rank."""
        return self.ranks[:-1]

    def has_store(self):
        """Is there a store that a rank reaches by itself? By tcp it is rank 0's, and there once that has tried."""
        if self.kind == "tcp":
            self.try_it(self.ranks[0], seconds=SHORT_SECONDS)
            self.ranks[0].says(MISSED)

    def keys(self, store, *names) -> dict[str, str]:
        """Those of the names that stand in the store."""
        if self.kind != "file":
            return {name: store.get(name).decode() for name in names if store.check([name])}
        records = records_of(self.path.read_bytes()) if self.path.exists() else {}
        return {name: records[name] for name in names if name in records}

    def await_check_in(self, rank, after=-1) -> int:
        """Until that rank waits for others in a later attempt than that. Gives the attempt's number."""
        store = TCPStore("127.0.0.1", self.port, is_master=False) if self.kind == "tcp" else self.agent
        group = "/reef/attempt_0/group" if self.agent else "/reef/group"
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            number = int(self.keys(store, group).get(group, -1))
            if number > after and self.keys(store, f"{group}_{number}/members/checked_in/{rank.rank}"):
                return number
            assert time.monotonic() < deadline, f"rank {rank.rank} has not checked in"
            time.sleep(POLL_SECONDS)

    def end(self):
        for each in self.started:
            each.kill()


HISTORIES = []


def history(ranks=(2, 3), kinds=("tcp", "file", "agent")):
    """tcp: rank 0 serves the store; agent: something outlives all ranks and serves it. More ranks than are needed only there."""

    def add(function):
        HISTORIES.extend((function, size, kind) for size in ranks for kind in kinds if size == min(ranks) or kind == "tcp")
        return function

    return add


@history()
def again_and_again(job):
    job.all_come_up()
    job.all_come_up()


@history(kinds=("tcp",))
def port_in_use(job):
    """By another program while rank 0 tries."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", job.port))
        taken.listen()
        for _ in range(2):
            job.try_it(job.ranks[0])
            job.ranks[0].says("is in use")


@history()
def first_alone(job):
    job.try_it(job.ranks[0], seconds=SHORT_SECONDS)
    job.ranks[0].says(MISSED)


@history()
def each_alone(job):
    job.has_store()
    for rank in job.ranks:
        job.try_it(rank, seconds=SHORT_SECONDS)
        rank.says(MISSED)


@history()
def last_is_late(job):
    """It comes when the others have given up, and waits until they try again."""
    job.try_it(*job.others, seconds=SHORT_SECONDS)
    for rank in job.others:
        rank.says(f"rank {job.size - 1} of {job.size} {MISSED}")
    job.try_it(job.last)
    job.await_check_in(job.last)
    job.try_it(*job.others)
    job.have_come_up()


def ends_in_a_group(job, gone):
    job.all_come_up()
    job.ranks[gone].kill()
    others = [rank for rank in job.ranks if rank.rank != gone]
    for rank in others:
        rank.tell("add")
    for rank in others:
        rank.says(f"rank {gone} .* is gone", kind="RankFailed")
    job.start_anew(gone)


@history()
def last_ends_in_a_group(job):
    ends_in_a_group(job, job.size - 1)


@history()
def first_ends_in_a_group(job):
    ends_in_a_group(job, 0)


@history()
def all_end_in_a_group(job):
    job.all_come_up()
    job.start_all_anew()


@history()
def last_ends_while_it_waits(job):
    """And comes anew before the others."""
    job.has_store()
    job.try_it(job.last)
    before = job.await_check_in(job.last)
    job.try_it(job.start_anew(job.size - 1))
    job.await_check_in(job.last, after=before)
    job.try_it(*job.others)
    job.have_come_up()


@history(ranks=(3,))
def last_ends_while_others_wait(job):
    """Who waits goes with the one that has come anew."""
    job.try_it(job.ranks[0], job.last)
    job.await_check_in(job.ranks[0])
    before = job.await_check_in(job.last)
    job.try_it(job.start_anew(2))
    job.await_check_in(job.ranks[0], after=before)
    job.await_check_in(job.last, after=before)
    job.try_it(job.ranks[1])
    job.have_come_up()


@history()
def last_has_ended_when_others_come(job):
    """And has not come anew: the others are told."""
    job.has_store()
    job.try_it(job.last)
    job.await_check_in(job.last)
    job.last.kill()
    job.try_it(*job.others)
    for rank in job.others:
        rank.says(rf"rank {job.size - 1} \(process .*\) ended while the group was coming up")
    job.start_anew(job.size - 1)


@history()
def one_cannot_join(job):
    job.try_it(*job.others)
    job.try_it(job.last, interface="nope0")
    for rank in job.ranks:
        rank.says(f"rank {job.size - 1} of {job.size} .* interface 'nope0'")


@history(ranks=(3,))
def one_sleeps_while_another_gives_up(job):
    """It wakes in the attempt before, and is told so, while the others wait in the next."""
    first, sleeper, last = job.ranks
    job.try_it(first, seconds=SHORT_SECONDS)
    job.try_it(sleeper)
    job.await_check_in(first)
    before = job.await_check_in(sleeper)
    sleeper.signal(signal.SIGSTOP)
    first.says(f"rank 2 of 3 {MISSED}")
    job.try_it(first, last)
    job.await_check_in(first, after=before)
    job.await_check_in(last, after=before)
    sleeper.signal(signal.SIGCONT)
    sleeper.says(f"rank 2 of 3 {MISSED}")
    job.try_it(sleeper)
    job.have_come_up()


@history()
def world_sizes_differ(job):
    """One of three comes when the others have failed, and is told, if the store is still there."""
    job.try_it(job.ranks[0])
    job.await_check_in(job.ranks[0])
    job.try_it(job.ranks[1], size=job.size + 1)
    for rank in job.ranks[:2]:
        rank.says("was started for a world of")
    if job.size > 2 and job.kind != "file":
        job.try_it(job.last)
        job.last.says("was started for a world of")


@history()
def all_end_after_a_failure(job):
    """What failed for others is not told to those that have come anew."""
    job.try_it(job.ranks[0])
    job.await_check_in(job.ranks[0])
    job.try_it(job.ranks[1], size=job.size + 1)
    for rank in job.ranks[:2]:
        rank.says("was started for a world of")
    job.start_all_anew()


@history()
def claimed_twice(job):
    """Who comes when both have failed is told once, if the store is still there."""
    job.has_store()
    job.try_it(job.last)
    job.await_check_in(job.last)
    other = job.start(job.size - 1)
    job.try_it(other)
    twice = f"rank {job.size - 1} of {job.size} is claimed twice, by process .* and process"
    for rank in (job.last, other):
        rank.says(twice)
    if job.kind != "file":
        for rank in job.others:
            job.try_it(rank)
            rank.says(twice)


@history()
def claimed_in_a_group(job):
    """By a process that is let in neither then nor later. The group goes on."""
    job.all_come_up()
    other = job.start(1)
    for _ in range(2):
        job.try_it(other)
        other.says(f"rank 1 of {job.size} is claimed twice, by process .* and process")
    for rank in job.ranks:
        rank.tell("add")
    job.have_come_up()


@history(ranks=(3,))
def a_smaller_world_before(job):
    """And who is new in the larger one comes first."""
    job.all_come_up(job.others)
    job.try_it(job.last)
    job.await_check_in(job.last)
    job.try_it(*job.others)
    job.have_come_up()


@history(ranks=(3,))
def a_larger_world_before(job):
    job.all_come_up()
    job.all_come_up(job.others)


@pytest.fixture(scope="module")
def outcomes(build_dir, tmp_path_factory):
    """None or what was thrown, of each history. They mostly wait, so many run at once."""
    probe = str(build_dir / "tests" / "attempts_probe")
    folder = tmp_path_factory.mktemp("attempts")

    def outcome(row):
        function, ranks, kind = row
        own = folder / f"{function.__name__}_{ranks}_{kind}"
        own.mkdir()
        with ReservedPort() as port:
            job = Job(probe, ranks, kind, port, own)
            try:
                job.start_all()
                function(job)
                job.all_come_up()
                job.all_come_up()
            except (AssertionError, OSError, RuntimeError, queue.Empty) as error:
                return error
            finally:
                job.end()
        return None

    results = {}
    for first in range(0, len(HISTORIES), AT_ONCE):
        results |= beside_each_other(outcome, HISTORIES[first : first + AT_ONCE])
    return results


@pytest.mark.parametrize("row", HISTORIES, ids=lambda row: f"{row[0].__name__}-{row[1]}-{row[2]}")
def test_ranks_come_up_whatever_was_before(outcomes, row):
    if outcomes[row] is not None:
        raise outcomes[row]
