"""What an exchange costs, in Python: the same numbers as in C++, whose laws are in tests/unit and tests/distributed."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import reef

PROGRAM = str(Path(__file__).resolve().parents[1] / "distributed" / "price_exchange_ranks.py")
LINK = reef.Link(0.4e-3, 1e8, 1e-5)


def test_prices_are_of_all_methods_the_fastest_first():
    prices = reef.price_exchange(LINK, 1_000_000, ranks=8, density=0.001)
    assert [each.seconds for each in prices.methods] == sorted(each.seconds for each in prices.methods)
    assert {each.method: each.gives for each in prices.methods}.items() >= {
        "none": "exact", "bfloat16": "error_feedback", "gtopk": "error_feedback", "gtopk_tree": "lossy",
    }.items()  # fmt: skip
    assert (prices.link, prices.elements, prices.ranks) == (LINK, 1_000_000, 8)
    entries = -(-1_001_472 // 1000)  # of eight slices, each of a multiple of 256 elements
    assert prices["topk"].sent_bytes == 7 * 8 * entries
    assert prices["gtopk"].link_seconds == pytest.approx(3 * (0.4e-3 + 1e-5 + 8 * entries / 1e8))
    assert str(prices).startswith("1000000 elements on 8 ranks, 0.400 ms of latency, 0.010 ms a message, 100.0 MB/s\n")
    assert all(each.method in str(prices) for each in prices.methods)


def test_what_is_given_counts():
    def of(**given):
        return reef.price_exchange(LINK, 100_000, **{"ranks": 4, "density": 0.01, **given})

    assert of(density={0: 0.25, 100: 0.01}) == of()
    assert of(density=0.02)["topk"].sent_bytes == 2 * of()["topk"].sent_bytes
    assert of(divided=True)["none"].sent_bytes * 2 == of()["none"].sent_bytes
    assert of(work=reef.ExchangeWork(select=1e-9))["gtopk"].work_seconds == pytest.approx(100_352e-9)
    assert of(work=reef.ExchangeWork(select=1e-9))["none"] == of()["none"]
    assert reef.price_exchange(LINK, [100_000, 50_000], ranks=4)["none"].sent_bytes == sum(
        reef.price_exchange(LINK, elements, ranks=4)["none"].sent_bytes for elements in (100_000, 50_000)
    )
    assert {each.method for each in of(shapes=[[300, 300], [300]]).methods} - {each.method for each in of().methods} == {
        "powersgd", "powersgd_alternating",
    }  # fmt: skip
    assert of(shapes=[[300, 300], [300]], rank=2)["powersgd"].sent_bytes == 2 * 3 * 4 * (900 // 4 + 600 // 4)
    in_two = reef.price_exchange(LINK, [100_000, 300], ranks=4, shapes=[[[300, 300]], [[300]]])
    assert in_two["powersgd"].sent_bytes == 2 * 3 * 4 * (1200 // 4 + 1200 // 4 + 300 // 4)
    assert of(bits=4)["qsgd"].sent_bytes == 2 * 3 * 49 * (4 + 64 * 4)
    assert all(each.seconds == 0 for each in of(ranks=1).methods)
    assert of(ranks=4096).ranks == 4096


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": 0}, "0 ranks: give 1 to 4096"),
        ({"ranks": 1 << 40}, "ranks"),
        ({"elements": 0}, "a bucket of 0 elements"),
        ({"link": reef.Link(1e-3, 0)}, "more than 0 bytes per second"),
        ({"link": reef.Link(float("nan"), 1e8)}, "0 seconds or more"),
        ({"density": 2}, "density 2"),
        ({"entropy_coded": True}, "entropy_coded, which compression auto does not take"),
        ({"work": reef.ExchangeWork(add=-1)}, "give 0 or more"),
        ({"work": reef.ExchangeWork(rebuild=float("inf"))}, "give 0 or more"),
        ({"shapes": [[100, 100]]}, "shapes of 10000 elements for a bucket of 1000"),
        ({"shapes": [[-1, 100]]}, "a dimension of -1"),
        ({"elements": [10, 10], "shapes": [[[10]]]}, "shapes for 1 buckets, which are 2"),
    ],
)
def test_refusals(given, says):
    given = {"link": LINK, "elements": 1000, "ranks": 4, **given}
    with pytest.raises(ValueError, match=says):
        reef.price_exchange(given.pop("link"), given.pop("elements"), **given)


def test_a_link_is_found_again():
    def sample(rounds, messages, size):
        seconds = rounds * LINK.latency_seconds + messages * (LINK.message_seconds + size / LINK.bytes_per_second)
        return reef.LinkSample(rounds, messages, messages * size, seconds)

    fit = reef.fit_link([sample(rounds, 8, 1 << i) for rounds in (1, 8) for i in range(8, 22)])
    assert fit.link.latency_seconds == pytest.approx(LINK.latency_seconds)
    assert fit.link.bytes_per_second == pytest.approx(LINK.bytes_per_second)
    assert fit.link.message_seconds == pytest.approx(LINK.message_seconds)
    assert fit.worst_error < 1e-9
    with pytest.raises(ValueError, match="do not tell a bandwidth"):
        reef.fit_link([sample(1, 1, 1000)] * 3)
    bound = reef.bound_link([sample(1, 1, 1000)] * 3).link
    assert bound.latency_seconds >= LINK.latency_seconds and bound.bytes_per_second <= LINK.bytes_per_second
    with pytest.raises(ValueError, match="no samples"):
        reef.bound_link([])


def test_json_has_what_the_table_has():
    text, table = torch.ops.reef.price_exchange(1e-3, 1e8, 0.0, [1000], 2, False, [], [], [], [], [], [0.0] * 10)
    assert [line.split()[0] for line in table.splitlines()[2:]] == [each["method"] for each in json.loads(text)["methods"]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_measure_the_same(ranks):
    result = run_ranks([PROGRAM], ranks)
    assert result.ok, result.report()
    assert all(rank.output.splitlines()[-1] == "done" for rank in result.ranks)


def test_one_rank_has_no_link():
    with pytest.raises(ValueError, match="no link"):
        reef.measure_link(reef.init_process_group())
