"""A budget on a CUDA device: the program computes what it would have computed, bit for bit, whatever its streams do."""

import contextlib
import ctypes
import functools
import random

import pytest
import torch
from played_device import PLAYED, delays

import reef

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 1 << 20
WIDTH, BATCH, TOKENS = (128, 4, 128) if PLAYED else (512, 8, 256)
LONG_CYCLES = 20_000_000
"""About ten milliseconds of a device: longer than the host needs to give it the work of a step."""


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


def transformer(width=WIDTH, layers=6):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(width, 8) for _ in range(layers))).cuda()


def optimizer_of(name, net):
    if name == "torch":
        return torch.optim.AdamW(net.parameters(), lr=1e-3)
    return reef.optim.AdamW(net.parameters(), lr=1e-3, state=name, min_quantized_numel=0)


def train(name, bytes_allowed=None, steps=5, tiers=None, before_backward=lambda: None, **options):
    """The parameters after some steps, the peak of what was allocated, and what the budget has done."""
    net = transformer()
    optimizer = optimizer_of(name, net)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    budget = None
    if bytes_allowed is not None:
        budget = reef.budget(bytes_allowed, net, optimizer, device="cuda", tiers=tiers, **options).start()
    try:
        generator = torch.Generator("cuda").manual_seed(1)
        losses = []
        for _ in range(steps):
            x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda", generator=generator)
            optimizer.zero_grad()
            loss = net(x).square().mean()
            before_backward()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    finally:
        if budget is not None:
            budget.stop()
    torch.cuda.synchronize()
    result = [*(p.detach().cpu() for p in net.parameters()), torch.stack(losses).cpu()]
    return result, torch.cuda.max_memory_allocated(), budget.use() if budget is not None else None


@functools.cache
def train_plainly(name):
    """The parameters without a budget, and the peak of what was allocated."""
    return train(name)[:2]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module", autouse=True)
def a_first_step_of_cublas():
    train("torch", steps=1)  # its workspaces are allocated


@pytest.mark.parametrize("percent", [75, 50, 35])
@pytest.mark.parametrize("optimizer", ["torch", "float32", "int8"])
def test_trains_inside_a_budget_bit_for_bit(optimizer, percent):
    plain, peak = train_plainly(optimizer)
    found, _, use = train(optimizer, peak * percent // 100)
    assert same(found, plain)
    assert use.evictions > 0 and use.unseen_writes == 0
    assert use.bytes_out > 0


@pytest.mark.parametrize("tier", [reef.host_tier, lambda: reef.pinned_tier(1 << 30), reef.disk_tier],
                         ids=["host", "pinned", "disk"])
def test_every_tier(tier, tmp_path):
    plain, peak = train_plainly("torch")
    made = reef.disk_tier(tmp_path) if tier is reef.disk_tier else tier()
    found, _, use = train("torch", peak // 2, tiers=[made])
    assert same(found, plain)
    assert use.bytes_out > 0 and use.bytes_in > 0


def test_the_devices_work_may_lag_far_behind():
    plain, peak = train_plainly("torch")
    for cycles in (LONG_CYCLES // 10, LONG_CYCLES):
        found, _, _ = train("torch", peak // 2, before_backward=lambda cycles=cycles: torch.cuda._sleep(cycles))
        assert same(found, plain)


def test_the_speed_of_a_tier_may_be_asked_for_inside_a_budget():
    plain, peak = train_plainly("torch")
    asked = []

    def ask():
        asked.append(reef.pinned_tier(64 * MIB).speed("cuda"))

    found, _, use = train("torch", peak // 2, before_backward=ask)
    assert same(found, plain)
    assert use.evictions > 0 and use.peak_bytes <= peak
    assert all(speed.bytes_per_second > 0 for speed in asked)


def inside(bytes_allowed, targets):
    return reef.budget(bytes_allowed, targets, device="cuda") if bytes_allowed else contextlib.nullcontext()


# What one stream wrote last, late, leaves for a tier because another stream needs room. Of a tensor that two streams use
# nobody knows who is last: it stays.
def test_a_write_by_another_stream_is_not_lost():
    def run(bytes_allowed=None):
        torch.manual_seed(0)
        side = torch.cuda.Stream()
        here = [torch.randn(MIB, device="cuda") for _ in range(8)]
        with torch.cuda.stream(side):
            there = [torch.randn(MIB, device="cuda") for _ in range(8)]
        both = [torch.randn(MIB, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()
        with inside(bytes_allowed, here + there + both):
            for step in range(4):
                with torch.cuda.stream(side):
                    torch.cuda._sleep(LONG_CYCLES)
                    for i, tensor in enumerate(there):
                        tensor.mul_(1.0 + 0.25 * (i + step))
                    both[0].mul_(1.5)
                for i, tensor in enumerate(here):  # room is made on this stream
                    made = tensor * 2
                    tensor.add_(made, alpha=1.0 / (i + 2))
                torch.cuda.current_stream().wait_stream(side)
                both[1].add_(both[0])
                side.wait_stream(torch.cuda.current_stream())
        return [t.cpu() for t in here + there + both]

    plain = run()
    before = torch.cuda.memory_allocated()
    assert same(run(before + 40 * MIB), plain)


# Memory made by one stream and read late by another that was announced by record_stream.
def test_a_read_by_another_stream_sees_what_was_there():
    def run(bytes_allowed=None):
        torch.manual_seed(0)
        side = torch.cuda.Stream()
        kept = [torch.randn(MIB, device="cuda") for _ in range(12)]
        out = torch.zeros(12, device="cuda")
        with inside(bytes_allowed, kept):
            for i, tensor in enumerate(kept):
                made = tensor * 3
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(LONG_CYCLES // 4)
                    out[i].copy_(made.sum())
                made.record_stream(side)
                del made
            torch.cuda.current_stream().wait_stream(side)
        return [out.cpu(), *(t.cpu() for t in kept)]

    plain = run()
    before = torch.cuda.memory_allocated()
    assert same(run(before + 24 * MIB), plain)


def test_budgets_on_host_and_device_at_once():
    def run(device_bytes=None):
        torch.manual_seed(0)
        here = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
        there = transformer()
        with reef.budget("1TiB", here) as counted:
            alive = counted.use().live_bytes
        on_host = reef.budget(alive + 4 * MIB, here) if device_bytes else contextlib.nullcontext()
        with on_host, inside(device_bytes, there):
            for _ in range(3):
                here(torch.ones(64, 512)).square().mean().backward()
                there(torch.ones(BATCH, TOKENS, WIDTH, device="cuda")).square().mean().backward()
        return [*(p.grad.cpu() for p in here.parameters()), *(p.grad.cpu() for p in there.parameters())]

    torch.cuda.reset_peak_memory_stats()
    plain = run()
    assert same(run(torch.cuda.max_memory_allocated() // 2), plain)


def captured(net, x):
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = net(x)
    return graph, out


# A graph keeps addresses, which a budget does not.
def test_no_budget_beside_a_graph_and_no_graph_inside_a_budget():
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    x = torch.ones(64, 1024, device="cuda")
    with torch.no_grad():
        expected = net(x)
        torch.cuda.synchronize()
        with reef.budget("1GiB", net, device="cuda"):
            with pytest.raises(ValueError, match="graph cannot be captured"):
                captured(net, x)
            assert torch.equal(net(x), expected)
        graph, out = captured(net, x)
        with pytest.raises(ValueError, match="there is a CUDA graph"):
            reef.budget("1GiB", net, device="cuda").start()
        graph.replay()
        assert torch.equal(out, expected)
        del graph, out
        with reef.budget("1GiB", net, device="cuda"):
            assert torch.equal(net(x), expected)


def test_what_does_not_fit_is_an_error_and_training_goes_on():
    tensors = [torch.ones(MIB, device="cuda") for _ in range(8)]
    used = torch.cuda.memory_allocated()
    budget = reef.budget(used + 40 * MIB, tensors, device="cuda").start()
    try:
        with pytest.raises(reef.BudgetError):
            torch.ones(64 * MIB, device="cuda") + torch.ones(64 * MIB, device="cuda")
        budget.set_bytes(used + 1024 * MIB)
        assert torch.equal(torch.ones(64 * MIB, device="cuda")[:4].cpu(), torch.ones(4))
    finally:
        budget.stop()
    assert all(torch.equal(t.cpu(), torch.ones(MIB)) for t in tensors)


def test_a_cap_ends_with_its_budget():
    fraction = torch.cuda.get_per_process_memory_fraction()
    with reef.budget("1GiB", device="cuda"):
        assert torch.cuda.get_per_process_memory_fraction() < fraction
    assert torch.cuda.get_per_process_memory_fraction() == fraction


def zero_without_an_operator(tensor, elements):
    """Writes zeros as a kernel of the program's own would, by a pointer and on the current stream. If the page is away, the
    pointer is refused, and an operator writes them. Returns whether the pointer was given."""
    try:
        pointer = ctypes.c_void_p(tensor.data_ptr())
    except RuntimeError:
        tensor.data.view(-1)[:elements].zero_()
        return False
    cudart = ctypes.CDLL(None if PLAYED else f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert cudart.cudaMemsetAsync(pointer, 0, ctypes.c_size_t(elements * tensor.element_size()), stream) == 0
    return True


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tier", [reef.host_tier, lambda: reef.pinned_tier(1 << 30), reef.disk_tier],
                         ids=["host", "pinned", "disk"])
def test_what_is_written_without_an_operator_is_kept(tier, seed, tmp_path):
    def run(budget, kept):
        draw = random.Random(seed)
        sums = []
        with budget:
            for _ in range(150):
                i = draw.randrange(len(kept))
                if draw.random() < 0.4:
                    zero_without_an_operator(kept[i], draw.randrange(1, kept[i].numel()))
                elif draw.random() < 0.3:
                    kept[i].add_(1)
                else:
                    sums.append(kept[i].sum(dtype=torch.float64))
            torch.cuda.synchronize()
            unseen = budget.use().unseen_writes if isinstance(budget, reef.Budget) else 0
        return [torch.stack(sums).cpu(), *(t.cpu() for t in kept)], unseen

    def tensors():
        made = torch.Generator().manual_seed(seed)
        return [torch.randn(size, generator=made).cuda() for size in (999, 4096, 50_001, MIB // 8, MIB // 4, MIB // 4)]

    plain, _ = run(contextlib.nullcontext(), tensors())
    kept = tensors()
    made = reef.disk_tier(tmp_path) if tier is reef.disk_tier else tier()
    found, unseen = run(reef.budget(torch.cuda.memory_allocated() - MIB, kept, device="cuda", tiers=[made]), kept)
    assert same(found, plain)
    assert unseen > 0


@pytest.mark.parametrize("lags", ["copy", "kernel"] if PLAYED else ["nothing"])
@pytest.mark.parametrize("layers_later", [1, 3])
@pytest.mark.parametrize("tier", [reef.host_tier, lambda: reef.pinned_tier(1 << 30)], ids=["host", "pinned"])
def test_what_is_written_while_its_page_leaves_is_kept(tier, layers_later, lags):
    """Activations leave beside the program after their last use in the forward pass. The test writes to them about then."""
    recent = []
    written_before_it_left = 0

    def write(_, inputs, __):
        nonlocal written_before_it_left
        recent.append(inputs[0].detach())
        if len(recent) > layers_later:
            written_before_it_left += zero_without_an_operator(recent[-1 - layers_later], 1000)

    def run(bytes_allowed=None):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12))).cuda()
        for layer in net:
            layer.register_forward_hook(write)
        losses, use = [], None
        with contextlib.ExitStack() as stack:
            if bytes_allowed:
                budget = stack.enter_context(reef.budget(bytes_allowed, net, device="cuda", tiers=[tier()]))
            if bytes_allowed and PLAYED:
                stack.enter_context(delays(1, **{lags: {"copy": 5000, "kernel": 500}[lags]}))
            for _ in range(5):
                loss = net(torch.ones(512 if PLAYED else 2048, 256, device="cuda")).square().mean()
                recent.clear()
                loss.backward()
                with torch.no_grad():
                    for p in net.parameters():
                        p.sub_(p.grad)
                net.zero_grad()
                losses.append(loss.detach())
            if bytes_allowed:
                torch.cuda.synchronize()
                use = budget.use()
        return [torch.stack(losses).cpu(), *(p.detach().cpu() for p in net.parameters())], use

    torch.cuda.reset_peak_memory_stats()
    plain, _ = run()
    written_before_it_left = 0
    found, use = run(torch.cuda.max_memory_allocated() * 6 // 10)
    assert same(found, plain)
    assert use.fetches > 0 and written_before_it_left > 0
