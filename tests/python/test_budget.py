"""The budget under Python, over ordinary torch programs."""

import threading

import pytest
import torch
from budget_nets import addresses, go_only  # noqa: F401 (a fixture)

import reef

MANY = 1 << 40


def mlp(width=64, depth=8):
    layers = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.GELU()]
    return torch.nn.Sequential(*layers)


class CustomSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def train(net, batch, steps=3, make=lambda p: torch.optim.AdamW(p, lr=1e-2), loss=None, between=None):
    """The bytes of every loss, parameter and gradient."""
    torch.manual_seed(1)
    optimizer = make(net.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = (loss or (lambda: net(batch()).pow(2).mean()))()
        value.backward()
        optimizer.step()
        losses.append(value.detach().clone().numpy().tobytes())
        if between:
            between(step)
    return losses


def state(net):
    return [t.detach().clone().numpy().tobytes() for p in net.parameters() for t in (p, p.grad)]


def peak_of(run):
    ledger = reef.Ledger()
    before = sum(ledger.live().values())
    ledger.reset_peak()
    result = run()
    return result, ledger.peak().total - before


@pytest.mark.parametrize("part", [2, 3, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.RMSprop(p, foreach=False),
    ],
    ids=["AdamW", "SGD momentum", "RMSprop"],
)
def test_trains_inside_the_budget_bit_for_bit(make, part):
    def run(budgeted):
        torch.manual_seed(0)
        net = mlp()
        if not budgeted:
            losses = train(net, lambda: torch.randn(64, 64), make=make)
            return losses, state(net)
        base = reef.allocator_live_bytes() - sum(p.nbytes for p in net.parameters())
        with reef.budget(base + peak // part, net) as budget:
            losses = train(net, lambda: torch.randn(64, 64), make=make)
        assert budget.peak_bytes <= budget.use().budget_bytes
        assert budget.use().evictions > 0
        return losses, state(net)

    plain, peak = peak_of(lambda: run(False))
    assert run(True) == plain


def test_decorator_start_stop_and_again():
    net = mlp()
    budget = reef.budget(MANY, net)

    @budget
    def step():
        net(torch.randn(4, 64)).sum().backward()
        return reef.allocator_live_bytes() <= MANY

    assert step() and step()
    budget.start()
    with pytest.raises(ValueError, match="in force already"):
        budget.start()
    budget.stop()
    budget.stop()
    assert budget.use().budget_bytes == MANY
    assert "least that would do" in budget.report()
    with pytest.raises(ValueError, match="not in force"):
        budget.set_bytes(1)


@go_only
def test_spills_to_disk(tmp_path):
    torch.manual_seed(0)
    net = mlp()
    before = [p.detach().clone() for p in net.parameters()]
    tier = reef.disk_tier(tmp_path, "64MiB", block="64KiB")
    with reef.budget(MANY, net, tiers=[tier]) as budget:
        budget.set_bytes(budget.use().live_bytes - 100_000)
        assert budget.use().evictions > 0
        assert tier.use().written_bytes == budget.use().bytes_out
        assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    with reef.budget("1TiB", net, spill=tmp_path) as budget:
        budget.set_bytes(budget.use().live_bytes - 100_000)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


@go_only
def test_disk_tier_by_threads_and_by_io_uring(tmp_path):
    torch.manual_seed(0)
    net = mlp()
    before = [p.detach().clone() for p in net.parameters()]
    for io in ("automatic", "threads", "uring"):
        try:
            tier = reef.disk_tier(tmp_path, "64MiB", block="64KiB", io=io)
        except ValueError as error:
            assert io == "uring" and "io_uring is not to be had here" in str(error)
            continue
        with reef.budget(MANY, net, tiers=[tier]) as budget:
            budget.set_bytes(budget.use().live_bytes - 100_000)
            assert tier.use().written_bytes > 0
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="io 'aio' is not"):
        reef.disk_tier(tmp_path, io="aio")


def test_numpy_arrays_stay_valid():
    x = torch.randn(64, 64, requires_grad=True)
    with reef.budget(MANY) as budget:
        y = x * 2
        array = y.detach().numpy()
        expected = array.copy()
        z = y.exp()
        budget.set_bytes(budget.use().live_bytes - 4096)  # something else has to leave
        assert (array == expected).all()
        budget.set_bytes(MANY)
        z.sum().backward()
    assert (array == expected).all()


def is_known_as_out_of_memory(error):
    """As Lightning's is_oom_error and accelerate's find_executable_batch_size know it: by its words."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error) and len(error.args) == 1


def test_an_operator_that_does_not_fit_says_what_would_do():
    net = mlp()
    with reef.budget(MANY, net) as budget:
        budget.set_bytes(budget.use().live_bytes + 1000)
        with pytest.raises(reef.BudgetError, match=r"operator aten::.* is out of memory\. .*give at least \d+ bytes") as refused:
            net(torch.randn(4096, 64))
        assert is_known_as_out_of_memory(refused.value)
        budget.set_bytes("1GiB")
        net(torch.randn(4096, 64)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_foreach_that_does_not_fit_changes_nothing():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
    net(torch.randn(4, 64)).sum().backward()
    before = [p.detach().clone() for p in net.parameters()]
    with reef.budget(MANY, net) as budget:
        budget.set_bytes(budget.minimum_bytes + budget.use().live_bytes - sum(p.nbytes for p in net.parameters()))
        with pytest.raises(RuntimeError, match=r" out of memory\.") as refused:
            optimizer.step()
        assert is_known_as_out_of_memory(refused.value)
        budget.set_bytes(MANY)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


@go_only
def test_saving_an_evicted_tensor_is_an_error_and_not_a_broken_file(tmp_path):
    net = mlp()
    with reef.budget(MANY, net) as budget:
        budget.set_bytes(budget.use().live_bytes - sum(p.nbytes for p in net.parameters()) + 40_000)
        with pytest.raises(RuntimeError, match="evicted by a reef::Budget"):
            torch.save(net.state_dict(), tmp_path / "model.pt")
        budget.set_bytes(MANY)
    torch.save(net.state_dict(), tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt").keys() == net.state_dict().keys()


@pytest.mark.parametrize("mode", ["custom", "accumulation", "autocast", "evaluation", "retain", "double"])
def test_ways_of_training(mode):
    def run(part):
        torch.manual_seed(0)
        net = mlp()
        x = torch.randn(64, 64)

        def loss():
            if mode == "custom":
                return CustomSquare.apply(net(x)).mean()
            if mode == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    return net(x).float().pow(2).mean()
            value = net(x).pow(2).mean()
            if mode == "accumulation":
                value.backward()
                return net(x * 2).pow(2).mean()
            if mode == "retain":
                value.backward(retain_graph=True)
            if mode == "double":
                (gradient,) = torch.autograd.grad(value, [net[0].weight], create_graph=True)
                return value + gradient.norm()
            return value

        def between(step):
            if mode == "evaluation":
                with torch.no_grad():
                    net.eval()(torch.randn(128, 64))
                net.train()

        def go():
            return train(net, None, loss=loss, between=between, make=lambda p: torch.optim.AdamW(p, foreach=False))

        if part is None:
            return go(), state(net)
        base = reef.allocator_live_bytes() - sum(p.nbytes for p in net.parameters())
        with reef.budget(base + peak // part, net) as budget:
            losses = go()
        assert budget.peak_bytes <= budget.use().budget_bytes
        assert budget.use().evictions > 0
        return losses, state(net)

    plain, peak = peak_of(lambda: run(None))
    assert run(3) == plain


def test_a_data_loader_with_workers():
    net = mlp()
    data = torch.utils.data.TensorDataset(torch.randn(64, 64))
    with reef.budget(MANY, net) as budget:
        budget.set_bytes(budget.use().live_bytes + 100_000)
        for (x,) in torch.utils.data.DataLoader(data, batch_size=16, num_workers=2):
            net(x).sum().backward()
        assert budget.use().evictions > 0


def test_python_threads():
    nets = [mlp(), mlp()]
    with reef.budget(MANY, *nets) as budget:
        budget.set_bytes(budget.use().live_bytes + 200_000)

        def work(net):
            for _ in range(5):
                net(torch.ones(16, 64)).sum().backward()

        threads = [threading.Thread(target=work, args=(net,)) for net in nets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert budget.peak_bytes <= budget.use().budget_bytes
    assert all(torch.isfinite(p.grad).all() for net in nets for p in net.parameters())


def test_what_more_would_save_is_foretold():
    net = mlp()
    with reef.budget(MANY, net) as budget:
        budget.set_bytes(budget.use().live_bytes + 100_000)
        assert budget.outlook() == []
        train(net, lambda: torch.randn(64, 64), steps=5, make=lambda p: torch.optim.AdamW(p, foreach=False))
        steps = budget.outlook()
        assert steps[0].budget_bytes == budget.use().budget_bytes
        assert [s.budget_bytes for s in steps] == sorted({s.budget_bytes for s in steps})
        assert steps[0].moved_bytes > 0
        assert steps[-1].moved_bytes == 0 and steps[-1].waited_seconds == 0
        assert "in tier host" in budget.report() and budget.report().count("a step within") == len(steps)


def test_bad_input():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="CUDA"):
            reef.pinned_tier("1MiB")
    with pytest.raises(ValueError, match="no budget for cuda"):
        reef.budget("1GiB", device="cuda:15", tiers=[reef.host_tier()]).start()
    with pytest.raises(ValueError, match="not both"):
        reef.budget("1GiB", spill="/tmp", tiers=[])
    with pytest.raises(ValueError):
        reef.budget("1 potato")
    with pytest.raises(RuntimeError, match="cannot make a swap file in '/nowhere'"):
        reef.disk_tier("/nowhere")
    with reef.budget(MANY), pytest.raises(ValueError, match="in force already"):
        reef.budget(MANY).start()


@go_only
def test_what_is_written_without_an_operator_is_kept():
    x = torch.ones(1000)
    with reef.budget(MANY, x) as budget:
        others = budget.use().live_bytes - x.nbytes

        def leave():
            budget.set_bytes(others + 100)
            budget.set_bytes(MANY)

        leave()
        assert x.sum().item() == 1000
        x.apply_(lambda value: value + 1)
        leave()
        assert x.sum().item() == 2000
        assert budget.use().unseen_writes == 1


def test_the_timeline_counts_what_is_away_and_what_moved():
    torch.manual_seed(0)
    net = mlp()
    with reef.budget(MANY, net) as budget:
        ledger = budget.ledger
        ledger.start_timeline()
        budget.set_bytes(budget.use().live_bytes - 60_000)
        train(net, lambda: torch.randn(4, 64), make=lambda p: torch.optim.SGD(p, foreach=False))
        use = budget.use()
    timeline = ledger.stop_timeline()
    away, out, back = (timeline.counters[f"bytes {what} (cpu)"] for what in ("away", "moved out", "moved in"))
    for series in (away, out, back):
        assert [t for t, _ in series] == sorted(t for t, _ in series)
    assert [v for _, v in out] == sorted(v for _, v in out) and out[-1][1] == use.bytes_out
    assert [v for _, v in back] == sorted(v for _, v in back) and back[-1][1] >= use.bytes_in
    assert max(v for _, v in away) >= 60_000
    assert away[-1][1] == 0 and min(v for _, v in away) == 0
    assert "bytes moved out (cpu)" in timeline.trace()
