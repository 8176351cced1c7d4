"""Plans of pipelines from Python: what is chosen is what was asked for, fits, and costs what it says."""

import itertools
import random

import pytest

import reef


def chain(stages, seed=0, **options):
    draw = random.Random(seed)
    made = []
    for _ in range(stages):
        forward = draw.uniform(0.3, 3)
        made.append(reef.PipelineChunkCost(forward, forward, forward, output_bytes=draw.choice([1, 5, 20]), kept_bytes=100))
    return reef.PipelineProfile(made, **options)


@pytest.mark.parametrize("objective", reef.PIPELINE_OBJECTIVES)
def test_the_best_cuts_are_the_best_of_all(objective):
    profile = chain(7, links=[reef.Link(0.1, 20.0)])
    values = {cuts: profile.objective_seconds(cuts, [0, 1, 2], 8, objective) for cuts in itertools.combinations(range(1, 7), 2)}
    found = profile.best_cuts([0, 1, 2], 8, count=4, objective=objective)
    assert [values[cuts] for cuts in found] == pytest.approx(sorted(values.values())[:4])


@pytest.mark.parametrize("objective", reef.PIPELINE_OBJECTIVES)
def test_the_best_divisions_hold_the_best_cuts(objective):
    profile = chain(5, links=[reef.Link(0.1, 20.0)])
    found = profile.best_divisions([0, 1, 2], 8, count=100, objective=objective)
    assert len(found) == 6 + 2 * 4 + 1  # of three chunks, of two, and of one
    assert [each.seconds for each in found] == pytest.approx(sorted(each.seconds for each in found))
    assert all(sum(each.ranks_per_chunk) == 3 and len(each.cuts) + 1 == len(each.ranks_per_chunk) for each in found)
    (best,) = profile.best_cuts([0, 1, 2], 8, objective=objective)
    of_one_rank_each = next(each for each in found if len(each.cuts) == 2)
    assert of_one_rank_each.seconds == pytest.approx(profile.objective_seconds(best, [0, 1, 2], 8, objective))


def test_asynchronous_schedules_are_planned_by_their_names():
    profile = chain(9, seed=1, links=[reef.Link(0.0, 2.0)])
    plan = reef.plan_pipeline(profile, 4, 16, schedules=["pipedream_2bw"])
    shape = dict(hops=plan.hops, micro_batches_per_update=16)
    assert plan.schedule == reef.pipeline_schedule("pipedream_2bw", 4, 64, **shape)
    assert plan.cost.makespan_seconds == plan.schedule.cost(profile.cut(plan.cuts)).makespan_seconds
    plain = reef.pipeline_schedule("pipedream_2bw", 4, 64, micro_batches_per_update=16).cost(profile.cut([2, 4, 7]))
    assert plan.cost.makespan_seconds < plain.makespan_seconds


def test_a_plan_may_give_a_chunk_to_several_ranks():
    stage = reef.PipelineChunkCost(1.0, 1.0, 1.0, output_bytes=1, kept_bytes=100, fixed_bytes=1000, gradient_bytes=20)
    slow = reef.PipelineChunkCost(4.0, 4.0, 4.0, output_bytes=1, kept_bytes=100, fixed_bytes=1000, gradient_bytes=20)
    profile = reef.PipelineProfile([slow, stage, stage], links=[reef.Link(0.0, 1000.0)], rank_bytes=[2900] * 4)
    with pytest.raises(ValueError, match="let chunks have several ranks"):
        reef.plan_pipeline(profile, 4, 12)
    plan = reef.plan_pipeline(profile, 4, 12, may_replicate=True)
    assert plan.schedule.rank_of[0] != plan.schedule.rank_of[1], plan.schedule.rank_of
    assert "rank 2: stages 0 to 1" in str(plan), str(plan)
    assert plan.cost.reduction_seconds > 0
    ends = max(rank.end_seconds for rank in plan.cost.ranks)
    assert plan.cost.makespan_seconds == pytest.approx(ends + plan.cost.reduction_seconds)
    with pytest.raises(ValueError, match="ranks_per_chunk"):
        reef.pipeline_schedule("zbv", 4, 12, ranks_per_chunk=[2, 2])


def test_a_plan_is_no_slower_than_any_schedule_by_name():
    profile = chain(9, seed=1, links=[reef.Link(0.0, 20.0)])
    plan = reef.plan_pipeline(profile, ranks=4, micro_batches=8)
    for name in ("gpipe", "1f1b", "zero_bubble", "interleaved", "zbv", "v_half", "greedy"):
        named = reef.plan_pipeline(profile, 4, 8, schedules=[name])
        assert named.schedule.name == name
        assert plan.cost.makespan_seconds <= named.cost.makespan_seconds
    whole = reef.plan_pipeline(profile, 4, 8, may_split=False)
    assert not any("I" in action for actions in whole.schedule.actions for action in actions)
    assert str(plan).startswith(f"{plan.schedule.name} of 8 micro-batches over 4 ranks: ")
    assert plan.costs == profile.cut(plan.cuts) and not plan.recompute


def test_a_plan_keeps_to_bytes_or_says_what_is_missing():
    free = reef.plan_pipeline(chain(8), 4, 16)
    most = max(rank.peak_bytes for rank in free.cost.ranks)
    less = reef.plan_pipeline(chain(8, rank_bytes=[most // 2] * 4), 4, 16)
    assert max(rank.peak_bytes for rank in less.cost.ranks) <= most // 2
    assert less.cost.makespan_seconds >= free.cost.makespan_seconds
    with pytest.raises(reef.BudgetError, match=r"rank \d needs \d+ bytes .*: \d+ bytes are missing") as error:
        reef.plan_pipeline(chain(8, rank_bytes=[50] * 4), 4, 16)
    needed = int(str(error.value).split(" needs ")[1].split()[0])
    assert max(rank.peak_bytes for rank in reef.plan_pipeline(chain(8, rank_bytes=[needed] * 4), 4, 16).cost.ranks) == needed


def test_what_cannot_be_planned_is_refused():
    for words, options in (
        ("3 stages cannot be cut for 4 ranks", dict(profile=chain(3), ranks=4, micro_batches=1)),
        ("let the plan replicate", dict(profile=chain(3), ranks=2, micro_batches=1, schedules=["chimera"])),
        ("train differently", dict(profile=chain(3), ranks=2, micro_batches=1, schedules=["1f1b", "pipemare"])),
        ("the bytes of 1 ranks", dict(profile=chain(3, rank_bytes=[1]), ranks=2, micro_batches=1)),
        ("number of micro-batches is -1", dict(profile=chain(3), ranks=2, micro_batches=-1)),
    ):
        with pytest.raises(ValueError, match=words):
            reef.plan_pipeline(**options)
    with pytest.raises(ValueError, match="ascending stages"):
        chain(3).cut([2, 1])
    with pytest.raises(ValueError, match="no objective of cuts"):
        chain(3).best_cuts([0, 1], 4, objective="fastest")


def test_a_plan_may_recompute():
    stage = reef.PipelineChunkCost(0.01, 0.01, 0.01, 1_000, 1_000_000, 1_000_000, 1_000, 10_000)
    profile = reef.PipelineProfile([stage] * 8, rank_bytes=[2_400_000] * 4)
    plan = reef.plan_pipeline(profile, ranks=4, micro_batches=16, may_recompute=True)
    assert plan.recompute and "recomputing" in str(plan)
    assert plan.costs == profile.cut(plan.cuts, recompute=plan.recompute)
    with pytest.raises(ValueError, match="unpack"):
        profile.cut([2, 4, 6], recompute=[(0, 2, 3), (4,)])
    assert profile.cut([2, 4, 6], recompute=True) == profile.cut([2, 4, 6], recompute=[(0, 2), (2, 4), (4, 6), (6, 8)])
    assert plan.cost.makespan_seconds < reef.plan_pipeline(profile, ranks=4, micro_batches=16).cost.makespan_seconds
