"""Subgroups and messages among real processes (tests/distributed/group_ranks.py is each rank): from Python, over the groups
of others, and when a rank is gone. No test measures time; the deadline of run_ranks is what a hang runs into."""

import re
from pathlib import Path

import pytest
from ranks import beside_each_other, run_ranks

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "group_ranks.py")


def run(ranks, *scene, **options):
    result = run_ranks([PROGRAM, *scene], ranks, **options)
    assert not [rank for rank in result.ranks if rank.stopped_by in ("deadline", "grace")], result.report()
    return result


def told(result, rank) -> str:
    assert result.ranks[rank].ok, result.report()
    (line,) = [line for line in result.ranks[rank].output.splitlines() if line.startswith("told: ")]
    return line


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_of_it_from_python(ranks):
    result = run(ranks, "face")
    assert result.ok, result.report()


def test_where_ranks_meet_in_a_file(tmp_path):
    result = run(2, "in_a_file", str(tmp_path / "meet"))
    assert result.ok, result.report()


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_over_groups_of_torch_distributed(debug):
    result = run(3, "by_torch", env={"TORCH_DISTRIBUTED_DEBUG": debug})
    assert result.ok, result.report()


PLACES = [
    "before a subgroup", "before it sends", "before it receives", "with messages under way", "in a subgroup",
    "in a subgroup of a subgroup", "while groups come up", "while messages go", "while a collective goes on",
]  # fmt: skip
STOPPED = ["before it sends", "in a subgroup", "in a subgroup of a subgroup"]
FAULTS = [
    *((where, "kill", victim) for victim in (0, 1) for where in PLACES),  # rank 0 serves the store
    *((where, "stop", 1) for where in STOPPED),
]


@pytest.fixture(scope="module")
def with_a_rank_that_is_gone():
    results = {}
    for first in range(0, len(FAULTS), 7):
        results |= beside_each_other(lambda row: run(3, "fault", *map(str, row)), FAULTS[first : first + 7])
    return results


@pytest.mark.parametrize(("where", "way", "victim"), FAULTS)
def test_a_rank_that_is_gone_is_named_by_its_rank_in_the_world(with_a_rank_that_is_gone, where, way, victim):
    result = with_a_rank_that_is_gone[where, way, victim]
    for rank in {0, 1, 2} - {victim}:
        text = told(result, rank)
        assert re.search(rf"^told: rank {rank} of 3.* failed: rank {victim} \(process ", text), text
        assert ("it is stopped" if way == "stop" else "is gone") in text, text
    member = told(result, 2)
    if "in a subgroup" in where:
        own = 0 if where == "in a subgroup" else 1
        assert f"rank 2 of 3 (rank {own} of 2 in a subgroup)" in member, member


HALF_THROUGH = [(of, victim) for of in ("reef", "torch", "file", "without heartbeat") for victim in (0, 1)]


def test_who_waits_for_a_message_that_is_half_through_is_told_when_its_rank_ends(tmp_path):
    """gloo tells nobody, so they would wait for the group's timeout, which comes after the test's deadline."""
    for first in range(0, len(HALF_THROUGH), 4):
        rows = HALF_THROUGH[first : first + 4]
        runs = beside_each_other(lambda row: run(2, "half_through", row[0], str(row[1]), str(tmp_path / f"{row[0]}{row[1]}")), rows)
        for (of, victim), result in runs.items():
            text = told(result, 1 - victim)
            named = "a rank is gone or stuck" if of == "torch" else f"rank {victim} (process "
            assert named in text, (of, victim, text)


def test_who_ends_early_is_not_missed_by_the_others_nor_named_for_them():
    result = run(4, "others_end_early")
    assert [result.ranks[rank].ok for rank in (2, 3)] == [True, True], result.report()
    text = told(result, 0)
    assert "failed: rank 1 (process " in text and "is gone" in text, text


def test_a_member_that_may_open_no_more_sockets_is_told_to_all():
    result = run(3, "without_sockets")
    assert result.ok, result.report()


@pytest.fixture(scope="module")
def where_timeouts_matter():
    return beside_each_other(lambda scene: run(2, scene), ["late", "comes_late"])


def test_a_subgroup_has_the_timeout_of_its_group(where_timeouts_matter):
    result = where_timeouts_matter["late"]
    text = told(result, 0)
    assert "no rank's process is known to have ended; all but rank 1" in text, text
    assert re.search(r"Timed out waiting (19999|20000)ms", text), text
    assert "told: " in result.ranks[1].output, result.report()


def test_messages_have_the_timeout_of_a_group_that_took_long_to_come_up(where_timeouts_matter):
    result = where_timeouts_matter["comes_late"]
    assert result.ok, result.report()
