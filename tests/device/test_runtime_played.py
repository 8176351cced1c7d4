"""The played CUDA runtime behaves like a device, also towards incorrect programs."""

import signal

import pytest
import torch
from played_device import PLAYED, delays, host_waits, slow_stream
from preloaded import run_text

pytestmark = pytest.mark.skipif(not PLAYED, reason="needs a played CUDA device")

LAG_US = 500_000
"""Longer than the program takes for the few operators that it runs meanwhile, also on a slow machine with other work."""


@pytest.fixture(scope="module", autouse=True)
def operators_that_have_run_before():
    """The first call of an operator may import modules, which takes longer than any lag."""
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x = torch.zeros(1000, device="cuda")
            torch.empty_like(x.clone()).copy_(x).mul_(2).add_(1).zero_()
            assert x.eq(0).all() and torch.ones(4, device="cuda").sum().item() == 4
    torch.cuda.synchronize()


def test_a_stream_works_beside_the_program_and_in_order():
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with slow_stream(torch.cuda.default_stream(), LAG_US):
        for i in range(4):
            x.mul_(2).add_(i)
        assert not torch.cuda.current_stream().query()
    assert torch.equal(x.cpu(), torch.full((1000,), 11.0))


def test_streams_do_not_wait_for_each_other_unless_told():
    side = torch.cuda.Stream()
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with slow_stream(torch.cuda.default_stream(), LAG_US):
        x.add_(1)
        with torch.cuda.stream(side):
            early = x.clone()
            side.synchronize()
            side.wait_stream(torch.cuda.default_stream())
            late = x.clone()
    torch.cuda.synchronize()
    assert early.eq(0).all() and late.eq(1).all()


def test_memory_that_is_used_again_too_early_shows():
    side = torch.cuda.Stream()
    source = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with slow_stream(side, LAG_US):
        with torch.cuda.stream(side):
            wrong = source.clone()
            copied = torch.empty_like(wrong).copy_(source)  # Runs after the delay.
        source.zero_()  # Does not wait for the other stream, which is the error under test.
        torch.cuda.synchronize()
    assert copied.eq(0).all()


@pytest.mark.parametrize("with_keys", [True, False])
def test_the_program_cannot_touch_a_devices_memory(with_keys, monkeypatch):
    """Whether or not a kernel has run before, with the processor's protection keys, if it has any, or without."""
    if not with_keys:
        monkeypatch.setenv("REEF_PLAYED_WITHOUT_KEYS", "1")
    for action in ("ctypes.memset(x.data_ptr(), 0, 4)", "ctypes.string_at(x.data_ptr(), 4)"):
        ended = run_text(f"""
            import ctypes, torch
            import reef
            x = torch.ones(1000, device="cuda")
            reef.optim.AdamW([torch.nn.Parameter(x)], lr=0.1).step()
            assert reef.count_nonfinite(x) == 0
            torch.cuda.synchronize()
            print("before", flush=True)
            {action}
        """)
        assert ended.returncode == -signal.SIGSEGV and "before" in ended.stdout, ended.stderr


def test_what_a_kernel_asserts_breaks_the_device():
    ended = run_text("""
        import torch, reef
        table, beyond = torch.ones(4, 2, device="cuda"), torch.tensor([4], device="cuda")
        torch.nn.functional.embedding(beyond, table)
        try:
            torch.cuda.synchronize()
        except torch.AcceleratorError as error:
            print(str(error).splitlines()[0])
    """)
    assert "device-side assert" in ended.stdout, ended.stderr


def test_a_captured_graph_runs_again_with_the_same_addresses():
    given = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = (given + 1) * 2
    for value in (3.0, 5.0):
        given.fill_(value)
        graph.replay()
        assert torch.equal(result.cpu(), torch.full((4,), 2 * (value + 1)))


def test_a_capture_forbids_what_waits():
    ended = run_text("""
        import torch, reef
        x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                (x + 1).sum().item()
        except torch.AcceleratorError as error:
            print(str(error).splitlines()[0])
    """)
    assert "during capture" in ended.stdout, ended.stderr


def test_random_numbers_follow_the_devices_generator():
    def draw():
        torch.cuda.manual_seed(3)
        return [torch.randn(100, device="cuda").cpu(), torch.nn.functional.dropout(torch.ones(100, device="cuda")).cpu()]

    with delays(1, kernel=300):
        late = draw()
    assert all(torch.equal(a, b) for a, b in zip(draw(), late, strict=True))
    assert not torch.equal(torch.randn(100, device="cuda").cpu(), late[0])


def test_a_step_of_a_network_is_the_cpus():
    def step(device):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(16, 32).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    for here, there in zip(step("cpu"), step("cuda"), strict=True):
        torch.testing.assert_close(here, there)


def test_waits_of_the_program_are_counted():
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    before = host_waits()
    x.add_(1)
    assert host_waits() == before
    torch.cuda.current_stream().synchronize()
    assert host_waits() == before + 1
