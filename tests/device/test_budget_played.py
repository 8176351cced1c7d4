"""A budget on a CUDA device that lags, refuses allocations or breaks on demand, which only a played device does."""

import random

import pytest
import torch
from played_device import PLAYED, delays, failing_allocations, host_bytes, slow_stream
from preloaded import run_text

import reef

pytestmark = pytest.mark.skipif(not PLAYED, reason="needs a played CUDA device")

MIB = 1 << 20
ELEMENTS = MIB


def tensors(count, device="cuda:0"):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ELEMENTS, generator=generator).to(device) for _ in range(count)]


def beside(bytes_more, device="cuda:0"):
    """A budget of so many bytes more (or fewer, if negative) than are allocated now."""
    return torch.cuda.memory_allocated(device) + bytes_more


@pytest.mark.parametrize("lagging", ["default", "side"])
def test_what_a_lagging_stream_writes_last_is_not_lost(lagging):
    kept = tensors(6)
    expected = [t.cpu() + 1 for t in kept]
    side = torch.cuda.Stream()
    lags = torch.cuda.default_stream() if lagging == "default" else side
    with reef.budget(beside(12 * MIB), kept, device="cuda:0") as budget:
        with slow_stream(lags, 20_000):
            for t in kept:
                t.add_(1)
            with torch.cuda.stream(side):
                made = torch.zeros(4 * ELEMENTS, device="cuda")
                doubled = made + made
            torch.cuda.synchronize()
        assert budget.use().evictions > 0
        del made, doubled
    assert all(torch.equal(t.cpu(), e) for t, e in zip(kept, expected, strict=True))


@pytest.mark.parametrize("kind", ["kernel", "copy"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tier", [lambda: reef.pinned_tier("1GiB"), reef.host_tier], ids=["pinned", "host"])
def test_any_delays_leave_the_values_alone(kind, seed, tier):
    kept = tensors(8)
    values = [t.cpu() for t in kept]
    with delays(seed, **{kind: 2000}), reef.budget(beside(-12 * MIB), kept, device="cuda:0", tiers=[tier()]):
        for step in range(3):
            for i, t in enumerate(kept):
                t.mul_(1.5).add_(kept[(i + step) % len(kept)])
                values[i] = values[i] * 1.5
                values[i] += values[(i + step) % len(kept)]
    assert all(torch.equal(t.cpu(), v) for t, v in zip(kept, values, strict=True))


@pytest.mark.parametrize("host", [False, True], ids=["device", "page-locked"])
@pytest.mark.parametrize("succeed", range(8))
def test_allocations_that_fail_are_errors_and_lose_nothing(host, succeed):
    kept = tensors(8)
    values = [t.cpu() for t in kept]
    multiplied = [0] * len(kept)
    with reef.budget(beside(-12 * MIB), kept, device="cuda:0", tiers=[reef.pinned_tier("1GiB"), reef.host_tier()]):
        torch.cuda.empty_cache()
        with failing_allocations(succeed, host=host):
            for _ in range(3):
                for i, t in enumerate(kept):
                    try:
                        t.mul_(2)
                        multiplied[i] += 1
                    except torch.OutOfMemoryError:
                        pass
    for t, value, times in zip(kept, values, multiplied, strict=True):
        assert torch.equal(t.cpu(), value * 2**times)


def test_page_locked_memory_ends_with_the_budget():
    kept = tensors(8)
    before = host_bytes()
    budget = reef.budget(beside(-12 * MIB), kept, device="cuda:0")
    with budget:
        for t in kept:
            t.mul_(2)
        assert host_bytes() > before
    assert host_bytes() == before
    assert "in tier pinned" in budget.report()


@pytest.mark.parametrize("current", [0, 1])
def test_without_a_number_cuda_is_the_current_device(current):
    try:
        torch.cuda.set_device(current)
        here, there = tensors(4, f"cuda:{current}"), tensors(4, f"cuda:{1 - current}")
        assert reef.pinned_tier("64MiB").speed("cuda").bytes_per_second > 0
        with reef.budget(beside(-4 * MIB, f"cuda:{current}"), here, device="cuda") as budget:
            for t in here * 3:
                t.mul_(2)
            evictions = budget.use().evictions
            assert evictions > 0
            for t in there * 3:
                t.mul_(2)
            assert budget.use().evictions == evictions
    finally:
        torch.cuda.set_device(0)


def test_budgets_on_two_devices_at_once():
    every = {device: tensors(8, device) for device in ("cuda:0", "cuda:1")}
    values = [t.cpu() for t in every["cuda:0"]]
    with delays(5, kernel=500, copy=1000):
        budgets = [reef.budget(beside(-12 * MIB, device), kept, device=device) for device, kept in every.items()]
        with budgets[0], budgets[1]:
            for _ in range(3):
                for here, there in zip(*every.values(), strict=True):
                    here.mul_(2)
                    there.mul_(2)
            assert all(budget.use().evictions > 0 for budget in budgets)
    for kept in every.values():
        assert all(torch.equal(t.cpu(), value * 8) for t, value in zip(kept, values, strict=True))


BROKEN = """
    import torch, reef
    from played_device import break_device
    kept = [torch.ones(1 << 20, device="cuda") for _ in range(8)]
    try:
        with reef.budget(20 << 20, kept, device="cuda:0", tiers=[{tier}]):
            for step in range(3):
                for i, t in enumerate(kept):
                    if (step, i) == (1, {at}):
                        break_device(0)
                    t.mul_(2)
    except torch.AcceleratorError as error:
        print("the program is told:", str(error).splitlines()[0])
    del kept
    print("and ends by itself")
"""


@pytest.mark.parametrize("tier", ['reef.pinned_tier("1GiB")', "reef.host_tier()"], ids=["pinned", "host"])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_broken_device_is_an_error_and_ends_no_process(tier, at):
    run = run_text(BROKEN.format(tier=tier, at=at))
    assert run.returncode == 0, run.stderr
    assert "the program is told: CUDA error: an illegal memory access" in run.stdout and "and ends by itself" in run.stdout


def test_a_tier_without_room_is_an_error_and_loses_nothing():
    kept = tensors(4)
    values = [t.cpu() for t in kept]
    with reef.budget(beside(4 * MIB), kept, device="cuda:0", tiers=[reef.pinned_tier("1MiB")]):
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match="no tier has room for it"):
                kept[0] + kept[1] + (kept[2] + kept[3])
        for t in kept:
            t.mul_(2)
    assert all(torch.equal(t.cpu(), value * 2) for t, value in zip(kept, values, strict=True))


PLUGGED = """
    import torch, reef
    plugged = torch.cuda.memory.CUDAPluggableAllocator({library!r}, "played_cuda_plugged_allocate", "played_cuda_plugged_free")
    torch.cuda.memory.change_current_allocator(plugged)
    ledger = reef.Ledger()
    net = torch.nn.Linear(64, 64).cuda()
    optimizer = reef.optim.AdamW(reef.shard(net, reef.init_process_group(rank=0, world_size=1)).parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    with reef.budget("1GiB", torch.nn.Linear(8, 8)):
        pass
    print("finite:", all(p.isfinite().all().item() for p in net.parameters()), sum(ledger.live("cuda").values()))
    try:
        reef.budget("1GiB", net, device="cuda").start()
    except ValueError as error:
        print("refused:", error)
"""


def test_another_allocator_is_refused_by_a_budget_and_of_no_concern_elsewhere():
    library = next(line.split()[-1] for line in open("/proc/self/maps") if "libplayed_cuda" in line)
    run = run_text(PLUGGED.format(library=library))
    assert run.returncode == 0, run.stderr
    assert "finite: True 0" in run.stdout
    assert "refused: there is no budget where the allocator of CUDA memory is 'pluggable'" in run.stdout, run.stdout


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lag", [{"copy": 2000}, {"kernel": 1000}, {"copy": 1000, "kernel": 500}], ids="-".join)
def test_a_slot_is_not_given_to_another_stream_while_it_is_copied(lag, seed):
    """Pages of two streams, whose copies do not wait for each other, share a tier that has hardly more room than they need."""
    elements = ELEMENTS // 4
    draw = random.Random(seed)
    made = torch.Generator().manual_seed(seed)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    values = [[torch.randn(elements, generator=made) for _ in range(6)] for _ in streams]
    kept = []
    for stream, of_stream in zip(streams, values, strict=True):
        with torch.cuda.stream(stream):
            kept.append([value.cuda() for value in of_stream])
    torch.cuda.synchronize()
    tier = reef.pinned_tier(8 * (MIB + 512))  # a slot of a page has a note behind it
    with delays(seed, **lag), reef.budget(beside(-6 * MIB), sum(kept, []), device="cuda:0", tiers=[tier]) as budget:
        for _ in range(120):
            of, i, j, anew = draw.randrange(2), draw.randrange(6), draw.randrange(6), draw.random() < 0.5
            with torch.cuda.stream(streams[of]):
                kept[of][i] = kept[of][i] * 0.5 + kept[of][j] if anew else kept[of][i].add_(kept[of][j])
            values[of][i] = values[of][i] * 0.5 + values[of][j] if anew else values[of][i].add_(values[of][j])
        assert budget.use().evictions > 0
    torch.cuda.synchronize()
    for of in range(2):
        assert all(torch.equal(t.cpu(), value) for t, value in zip(kept[of], values[of], strict=True))
