"""Schedules of pipelines as data: what C++ says of them is what a few lines of Python find out, for any schedule at all."""

import itertools
import json
import random
import re
from xml.etree import ElementTree

import pytest

import reef


def is_gradient(kind):
    return kind in "BI"


def run(schedule, costs, link_seconds=0.0):
    """The begin of each action if each message occupies its link for so long; None if ranks wait for each other for ever."""
    done, arrival, link_free = {}, {}, {}
    place, free = [0] * len(schedule.actions), [0.0] * len(schedule.actions)
    begin = [[] for _ in schedule.actions]
    last = len(schedule.rank_of[0]) - 1

    def ready(kind, chunk, m):
        """When what an action needs is there; None if that is not known yet."""
        before = []
        if kind == "F" and chunk > 0:
            before.append(arrival.get(("F", chunk - 1, m)))
        if is_gradient(kind):
            before.append(done.get(("F", chunk, m)))
            before += [arrival.get(("G", chunk + 1, m))] if chunk < last else []
        if kind == "W":
            before.append(done.get(("G", chunk, m)))
        return None if None in before else max(before, default=0.0)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while place[rank] < len(actions):
                chunk, kind, m = re.fullmatch(r"(\d+)([FBIW])(\d+)", actions[place[rank]]).groups()
                chunk, m = int(chunk), int(m)
                when = ready(kind, chunk, m)
                if when is None:
                    break
                cost = costs.chunks[chunk]
                seconds = {"F": cost.forward_seconds, "I": cost.input_seconds, "W": cost.weight_seconds}
                seconds["B"] = seconds["I"] + seconds["W"]
                begin[rank].append(max(when, free[rank]))
                free[rank] = begin[rank][-1] + seconds[kind]
                key = ("G" if is_gradient(kind) else kind, chunk, m)
                done[key] = free[rank]
                to = chunk + (1 if kind == "F" else -1)
                if kind != "W" and 0 <= to <= last:
                    receiver = schedule.rank_of[m % len(schedule.rank_of)][to]
                    arrival[key] = free[rank]
                    if receiver != rank:
                        link_free[rank, receiver] = max(link_free.get((rank, receiver), 0.0), free[rank]) + link_seconds
                        arrival[key] = link_free[rank, receiver]
                place[rank] += 1
                moved = True
    return begin if place == [len(actions) for actions in schedule.actions] else None


def any_schedule(draw):
    """A schedule that has grown by chance: whatever could run next, on any rank."""
    ranks, chunks, micro_batches = draw.randint(1, 4), draw.randint(1, 5), draw.randint(1, 5)
    directions = draw.choice([1, 1, 2])
    rank_of = tuple(tuple(draw.randrange(ranks) for _ in range(chunks)) for _ in range(directions))
    splits = {pair: draw.random() < 0.5 for pair in itertools.product(range(chunks), range(micro_batches))}
    actions, done = [[] for _ in range(ranks)], set()
    while True:
        ready = []
        for chunk, m in splits:
            if (chunk == 0 or ("F", chunk - 1, m) in done) and ("F", chunk, m) not in done:
                ready.append(("F", chunk, m))
            has_gradient = chunk == chunks - 1 or ("G", chunk + 1, m) in done
            if ("F", chunk, m) in done and has_gradient and ("G", chunk, m) not in done:
                ready.append(("I" if splits[chunk, m] else "B", chunk, m))
            if splits[chunk, m] and ("G", chunk, m) in done and ("W", chunk, m) not in done:
                ready.append(("W", chunk, m))
        if not ready:
            return reef.PipelineSchedule("by chance", micro_batches, rank_of, tuple(map(tuple, actions)))
        kind, chunk, m = draw.choice(ready)
        actions[rank_of[m % directions][chunk]].append(f"{chunk}{kind}{m}")
        done.add(("G" if is_gradient(kind) else kind, chunk, m))


def any_costs(draw, chunks):
    return reef.PipelineCosts([reef.PipelineChunkCost(*(float(draw.randint(0, 9)) for _ in range(3))) for _ in range(chunks)])


@pytest.mark.parametrize("seed", range(60))
def test_schedules_that_can_run_do_and_take_as_long_as_they_take(seed):
    draw = random.Random(seed)
    schedule = any_schedule(draw)
    costs = any_costs(draw, len(schedule.rank_of[0]))
    link_seconds = float(draw.randint(0, 5))
    linked = reef.PipelineCosts(costs.chunks, (), [reef.Link(0.0, 1.0, link_seconds)])
    expected = run(schedule, costs, link_seconds)
    assert expected is not None
    assert reef.PipelineSchedule.from_json(schedule.json()) == schedule
    cost = schedule.cost(linked)
    assert [list(of) for of in cost.begin_seconds] == expected
    assert cost.makespan_seconds == max((max(of) for of in cost.end_seconds if of), default=0.0)
    assert cost.messages == len(schedule.messages()) == len(set(schedule.messages()))


@pytest.mark.parametrize("seed", range(60))
def test_of_two_actions_that_change_places_either_is_found_to_wait_for_ever(seed):
    draw = random.Random(seed)
    schedule = any_schedule(draw)
    costs = any_costs(draw, len(schedule.rank_of[0]))
    refused = 0
    for _ in range(20):
        actions = [list(of) for of in schedule.actions]
        of = draw.choice([of for of in actions if of])
        i, j = draw.randrange(len(of)), draw.randrange(len(of))
        of[i], of[j] = of[j], of[i]
        changed = reef.PipelineSchedule("changed", schedule.micro_batches, schedule.rank_of, tuple(map(tuple, actions)))
        expected = run(changed, costs)
        if expected is None:
            refused += 1
            with pytest.raises(ValueError, match="wait for each other for ever, at action"):
                changed.cost(costs)
        else:
            assert [list(of) for of in changed.cost(costs).begin_seconds] == expected
    assert refused > 0 or sum(map(len, schedule.actions)) < 12


@pytest.mark.parametrize("row", reef.PIPELINE_SCHEDULES, ids=lambda row: row.name)
def test_every_schedule_of_the_table_is_made(row):
    schedule = reef.pipeline_schedule(row.name, ranks=4, micro_batches=8)
    assert schedule.name == row.name and schedule.adds_in_order
    assert reef.PipelineSchedule.from_json(schedule.json()) == schedule
    assert len(str(schedule).splitlines()) == 4 and str(schedule).startswith("rank 0: 0F0 ")
    assert (schedule.versions.rule == "flush") == row.synchronous
    if row.synchronous:
        costs = reef.PipelineCosts([reef.PipelineChunkCost(1.0, 1.0, 1.0)] * len(schedule.rank_of[0]))
        assert [list(of) for of in schedule.cost(costs).begin_seconds] == run(schedule, costs)


def test_what_is_asked_for_is_what_is_made():
    eager = reef.pipeline_schedule("1f1b", 4, 16, hops=[2])
    costs = reef.PipelineCosts([reef.PipelineChunkCost(2.0, 2.0, 2.0)] * 4, links=[reef.Link(0.0, 1.0, 2.0)])
    cost = eager.cost(costs)
    assert [rank.most_in_flight for rank in cost.ranks] == [7, 5, 3, 1]
    assert cost.makespan_seconds == 126 and cost.idle_share == pytest.approx(1 - 96 / 126)
    assert eager.period_seconds(costs) <= cost.makespan_seconds
    assert reef.hops_for([0, 1, 3, 4], 2, 4) == (1, 2, 2, 3)
    assert reef.hops_for([0, 1, 3, 4], 2, 4, splits=True) == (1, 2, 3, 3)
    assert reef.pipeline_schedule("interleaved", 2, 4, chunks_per_rank=3).rank_of == ((0, 1, 0, 1, 0, 1),)
    assert reef.pipeline_schedule("gpipe", 1, 1).repeated(2).actions == (("0F0", "0B0", "0F1", "0B1"),)
    assert reef.pipeline_from_block(6, [[0, 1, 2, 3]], 1).actions == (("0F0", "1F0", "1I0", "0I0", "1W0", "0W0"),)
    greedy = reef.greedy_pipeline(costs, [[0, 1, 0, 1]], 4, [4, 3])
    assert [rank.most_in_flight for rank in greedy.cost(costs).ranks] == [4, 3]


def test_messages_and_weights_follow_from_the_order():
    schedule = reef.pipeline_schedule("pipedream", 2, 3)
    assert schedule.actions == (("0F0", "0F1", "0B0", "0U0", "0F2", "0B1", "0U1", "0B2", "0U2"),
                                ("1F0", "1B0", "1U0", "1F1", "1B1", "1U1", "1F2", "1B2", "1U2"))  # fmt: skip
    assert schedule.messages()[:2] == (reef.PipelineMessage("output", 0, 1, 0, 0, 1), reef.PipelineMessage("output", 0, 1, 1, 0, 1))
    skips = [reef.PipelineSkip(0, (2,), 7)]
    three = reef.pipeline_schedule("gpipe", ranks=3, micro_batches=1)
    assert [(each.kind, each.chunk, each.to_chunk) for each in three.messages(skips)] == [
        ("output", 0, 1), ("output", 0, 2), ("output", 1, 2), ("gradient", 1, 0), ("gradient", 2, 1), ("gradient", 2, 0)]  # fmt: skip
    assert {message.kind for message in schedule.messages()[3:]} == {"gradient"}
    assert schedule.receives_in_order
    versions = [[version.forward for version in chunk] for chunk in schedule.weights()]
    assert versions == [[0, 0, 1], [0, 1, 2]]
    assert schedule.most_versions() == (2, 1)
    behind = reef.pipeline_schedule("pipedream_2bw", 3, 8, micro_batches_per_update=2)
    assert [version.backward for version in behind.weights()[2]] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert behind.most_versions() == (2, 2, 2)


def test_bytes_are_those_of_the_chunks_in_flight():
    chunk = reef.PipelineChunkCost(1.0, 1.0, 1.0, output_bytes=10, kept_bytes=1000, working_bytes=5, fixed_bytes=100_000)
    cost = reef.pipeline_schedule("1f1b", 2, 8).cost(reef.PipelineCosts([chunk] * 2))
    assert cost.message_bytes == 2 * 8 * 10
    # The gradient that it makes, an input that is early, and memory that is ready for two more.
    assert cost.ranks[1].peak_bytes == 100_000 + 1000 + 5 + 10 + 10 + 2 * 10
    assert 100_000 + 2 * 1000 + 5 <= cost.ranks[0].peak_bytes <= 100_000 + 2 * 1000 + 5 + 3 * 10


def test_what_cannot_be_is_refused_and_says_what():
    schedule = reef.pipeline_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="use one of gpipe, 1f1b"):
        reef.pipeline_schedule("2f2b", 2, 2)
    with pytest.raises(ValueError, match="number of ranks is -1"):
        reef.pipeline_schedule("1f1b", -1, 2)
    with pytest.raises(ValueError, match="of 1 chunks, and schedule '1f1b' has 2"):
        schedule.cost(reef.PipelineCosts([reef.PipelineChunkCost()]))
    with pytest.raises(ValueError, match="'actions' is missing"):
        reef.PipelineSchedule.from_json(json.dumps({"name": "x", "micro_batches": 1, "rank_of": [[0]]}))
    with pytest.raises(ValueError, match="chunk 0 runs 1 F, 0 B, 1 I, 0 W"):
        reef.PipelineSchedule("x", 1, ((0,),), (("0F0", "0I0"),)).messages()
    with pytest.raises(ValueError, match="four slots"):
        reef.pipeline_from_block(6, [[0, 1, 2]], 1)
    with pytest.raises(ValueError, match="no rule of versions"):
        reef.PipelineSchedule("x", 1, ((0,),), (("0F0", "0B0"),), reef.PipelineVersionRule("latest")).weights()


def test_a_chart_is_an_svg(tmp_path):
    schedule = reef.pipeline_schedule("zbv", 4, 8)
    costs = reef.PipelineCosts([reef.PipelineChunkCost(1.0, 1.0, 1.0)] * 8)
    schedule.save_chart(tmp_path / "zbv.svg", costs, title="Four ranks & a V")
    tree = ElementTree.parse(tmp_path / "zbv.svg")
    titles = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "Four ranks & a V" and sorted(titles[1:]) == sorted(itertools.chain(*schedule.actions))
