"""Asynchronous training over real processes (tests/distributed/parameter_server_ranks.py is each rank), and in virtual time."""

import tempfile
from pathlib import Path

import pytest
import reef
import torch
from ranks import beside_each_other, run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "parameter_server_ranks.py")
ROWS = [("synchronous", servers, workers) for servers in (1, 2) for workers in (1, 2, 3)]
ROWS += [("replays", 1, 3), ("replays", 2, 2), ("killed", 1, 2), ("killed", 2, 3), ("alone", 1, 1), ("stopped", 1, 2), ("stopped", 2, 2)]
LOST = [(what, servers, 2) for what in ("server_killed", "server_stopped") for servers in (1, 2)]


def run_row(row):
    what, servers, workers = row
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks([PROGRAM, what, str(servers), folder], servers + workers)


@pytest.fixture(scope="module")
def runs():
    results = {}
    for first in range(0, len(ROWS + LOST), 4):
        results |= beside_each_other(run_row, (ROWS + LOST)[first : first + 4])
    return results


KILLED = [row for row in ROWS if row[0] in ("killed", "alone")]


@pytest.mark.parametrize("row", [row for row in ROWS if row not in KILLED])
def test_a_run(runs, row):
    result = runs[row]
    assert result.ok, result.report()
    assert all("done" in rank.output.splitlines() for rank in result.ranks)


@pytest.mark.parametrize("row", KILLED)
def test_a_worker_that_is_killed_is_named_and_the_others_finish(runs, row):
    *others, last = runs[row].ranks
    assert last.signal == 9, last.output
    for rank in others:
        assert rank.ok and "done" in rank.output.splitlines(), runs[row].report()
    assert f"goes on without a worker: rank {last.rank} (process " in others[0].output


@pytest.mark.parametrize("row", LOST)
def test_a_server_that_is_lost_is_named_by_all(runs, row):
    what, servers, _ = row
    for rank in runs[row].ranks:
        if rank.rank != servers - 1:
            assert rank.ok and "done" in rank.output.splitlines(), runs[row].report()
            assert f"rank {servers - 1} (process " in rank.output


def test_a_simulated_run_is_its_recurrence():
    """w -= lr * g(w of the version that was read), of a log made by hand from the events."""
    log = reef.simulate_async(3, 10, staleness=4, compute=[0.2, 1.0, 3.0], seed=7)
    assert log.text == reef.simulate_async(3, 10, staleness=4, compute=[0.2, 1.0, 3.0], seed=7).text
    assert sum(log.staleness_histogram()) == 30 and len(log.staleness_histogram()) > 2
    begin = torch.linspace(-1, 1, 40)

    def gradient(worker: int, clock: int, w: torch.Tensor) -> torch.Tensor:
        return w * (1.0 + 0.1 * worker) - torch.sin(torch.arange(40.0) + clock)

    (end,) = reef.replay_async([log], [begin], gradient, lambda server, w, g, rate: w - 0.05 * rate * g)
    versions = [begin]
    for event in log.events:
        if event.kind == "push":
            assert event.staleness == len(versions) - 1 - event.version
            versions.append(versions[-1] - 0.05 * gradient(event.worker, event.clock, versions[event.version]))
    assert torch.equal(end, versions[-1])


def test_absences_are_in_the_log():
    log = reef.simulate_async(2, 5, staleness=0, absences=[(1, 1.5, 7.25)], seed=1)
    leaves = [event for event in log.events if event.worker == 1 and event.kind in ("leave", "join")]
    assert [(event.kind, event.seconds) for event in leaves[:2]] == [("leave", 1.5), ("join", 7.25)]
    assert log.workers == 2 and reef.AsyncLog(log.text).events == log.events


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: reef.simulate_async(2, 0), "pushes"),
        (lambda: reef.simulate_async(2, 1, rule="hogwild"), "delay_compensated"),
        (lambda: reef.simulate_async(2, 1, staleness=-1), "staleness is -1"),
        (lambda: reef.AsyncLog("nothing"), "line 1"),
        (lambda: reef.replay_async([], [], lambda *_: torch.zeros(1)), "0 logs"),
        (lambda: reef.replay_async([reef.simulate_async(1, 1)], [torch.zeros(3)], lambda *_: torch.zeros(2)), "of 3"),
        (lambda: reef.replay_async([reef.simulate_async(1, 1)], [torch.zeros(3)], lambda *_: torch.zeros(3)), "needs no step"),
        (lambda: reef.ParameterServer(None), "no process group"),
    ],
)
def test_what_means_nothing_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
