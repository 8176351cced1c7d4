"""Pipelines among real processes (tests/distributed/pipeline_ranks.py is each rank): from Python, over the groups of others,
and when a rank is gone. No test measures time; the deadline of run_ranks is what a hang runs into."""

import re
from pathlib import Path

import pytest
from ranks import beside_each_other, run_ranks

PROGRAMS = Path(__file__).resolve().parents[1] / "distributed"


def run(ranks, *scene, program="pipeline_ranks.py"):
    result = run_ranks([str(PROGRAMS / program), *scene], ranks)
    assert not [rank for rank in result.ranks if rank.stopped_by in ("deadline", "grace")], result.report()
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_of_it_from_python(ranks):
    result = run(ranks, "face")
    assert result.ok, result.report()


USES = [(scene, ranks) for scene, counts in {"states": (1, 2), "tied": (1, 2, 3), "planned": (1, 3), "together": (1, 2), "generation": (1, 3), "sampled": (1, 3), "scaled": (1, 2, 3)}.items()
        for ranks in counts]  # fmt: skip


@pytest.mark.parametrize(["scene", "ranks"], USES)
def test_what_programs_do_with_pipelines(scene, ranks):
    result = run(ranks, scene, program="pipeline_use_ranks.py")
    assert result.ok, result.report()


TRAINED = [("trained", 1), ("trained", 2), ("trained", 3), ("waves", 2), ("waves", 3), ("waves", 4)]


@pytest.mark.parametrize(["scene", "ranks"], TRAINED)
def test_batch_after_batch(scene, ranks):
    result = run(ranks, scene, program="pipeline_train_ranks.py")
    assert result.ok, result.report()


@pytest.mark.parametrize("ranks", [2, 3])
def test_modules_of_many_kinds(ranks):
    result = run(ranks, program="pipeline_modules_ranks.py")
    assert result.ok, result.report()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_given_by_mistake(ranks):
    result = run(ranks, program="pipeline_misuse_ranks.py")
    assert result.ok, result.report()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_modules_that_give_tensors_to_later_ones(ranks):
    result = run(ranks, program="pipeline_skips_ranks.py")
    assert result.ok, result.report()


def test_a_model_that_needs_three_times_what_a_rank_may_have():
    result = run(4, program="pipeline_limit_ranks.py")
    assert result.ok, result.report()


def test_over_a_group_of_torch_distributed():
    result = run(2, "by_torch")
    assert result.ok, result.report()


FAULTS = [(victim, at, way) for victim, at, way in
          [(0, 0, "forward"), (1, 0, "forward"), (2, 0, "forward"), (1, 3, "forward"), (0, 5, "forward"),
           (0, 0, "backward"), (1, 2, "backward"), (2, 3, "backward"), (2, 6, "backward"), (0, 9, "wave"), (1, 2, "stopped")]]  # fmt: skip


def test_a_rank_that_is_gone_is_named_wherever_it_was():
    for first in range(0, len(FAULTS), 6):
        results = beside_each_other(lambda row: run(3, "fault", *map(str, row)), FAULTS[first : first + 6])
        for (victim, at, way), result in results.items():
            for rank in {0, 1, 2} - {victim}:
                assert result.ranks[rank].ok, result.report()
                (line,) = [line for line in result.ranks[rank].output.splitlines() if line.startswith("told: ")]
                assert re.search(rf"^told: rank {rank} of 3.* failed: rank {victim} \(process ", line), (at, way, line)
