"""Where addresses stay: whoever reads or writes a tensor that is away, in whatever way, finds the right bytes."""

import contextlib
import copy
import faulthandler
import gc
import io
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest
import torch
from budget_nets import MANY, deep_net, live

import reef

DEADLINE_SECONDS = 900  # of one test, on a slow machine


@pytest.fixture(autouse=True)
def stay(monkeypatch):
    monkeypatch.setenv("REEF_ADDRESSES", "stay")
    with reef.budget(MANY) as budget:
        if budget.addresses != "stay":
            pytest.skip(f"addresses {budget.addresses}")
    faulthandler.dump_traceback_later(DEADLINE_SECONDS, exit=True)
    torch.set_num_threads(1)
    yield
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def squeezed(*targets, **options):
    """A budget, and what makes it so small that most of these tensors are away; operators that need a little go on."""
    with reef.budget(MANY, *targets, **options) as budget:

        def squeeze(mine):
            size = sum(tensor.nbytes for tensor in mine)
            for part in (0.8, 0.6, 0.4, 0.2):
                with contextlib.suppress(reef.BudgetError):
                    budget.set_bytes(MANY)
                    budget.set_bytes(live(budget) - int(part * size))
                    return
            pytest.fail("nothing would leave")

        yield budget, squeeze
        assert budget.use().evictions > 0
        budget.set_bytes(MANY)


def tensors(count=16, size=100_000, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(size) for _ in range(count)]


@pytest.mark.parametrize("born", ["before", "within"])
def test_every_reader_finds_what_is_away(born):
    before = tensors(size=20_000)
    with squeezed(before if born == "before" else []) as (budget, squeeze):
        data = before if born == "before" else [tensor.clone() for tensor in before]
        want = [tensor.clone().numpy().tobytes() for tensor in before]
        file = io.BytesIO()
        readers = [
            lambda tensor: tensor.numpy().tobytes(),
            lambda tensor: pickle.loads(pickle.dumps(tensor)).numpy().tobytes(),
            lambda tensor: copy.deepcopy(tensor).numpy().tobytes(),
            lambda tensor: numpy.from_dlpack(tensor).tobytes(),
            lambda tensor: bytes(tensor.untyped_storage()),
            lambda tensor: numpy.array(tensor.tolist(), dtype=numpy.float32).tobytes(),
        ]
        addresses = [tensor.data_ptr() for tensor in data]
        for reader in readers:
            squeeze(data)
            assert [reader(tensor) for tensor in data] == want
        squeeze(data)
        torch.save(data, file)
        squeeze(data)
        file.seek(0)
        assert all(torch.equal(a, b) for a, b in zip(torch.load(file), before, strict=True))
        assert [tensor.data_ptr() for tensor in data] == addresses
        assert budget.use().unannounced > 0


def test_system_calls_wait_for_what_is_away(tmp_path):
    data = tensors()
    with squeezed(data) as (_, squeeze):
        squeeze(data)
        for i, tensor in enumerate(data):
            tensor.numpy().tofile(tmp_path / str(i))
        squeeze(data)
        for i, tensor in enumerate(data):
            tensor.numpy()[:] = numpy.fromfile(tmp_path / str(i), dtype=numpy.float32) + 1
        assert all(torch.equal(a, b + 1) for a, b in zip(data, tensors(), strict=True))


def test_views_that_others_keep_stay_right_for_ten_steps():
    def train(world):
        torch.manual_seed(0)
        net = deep_net(8, 256)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        squeeze = world(net, optimizer)
        views = [parameter.detach().numpy() for parameter in net.parameters()]
        others = [torch.from_dlpack(parameter.detach()) for parameter in net.parameters()]
        kept = list(net.parameters())
        seen = []
        for step in range(10):
            optimizer.zero_grad()
            net(torch.full((64, 256), 0.1 * step)).pow(2).mean().backward()
            optimizer.step()
            squeeze(kept)
            seen += [view.copy() for view in views]
            views[step % len(views)] *= 0.5  # a write of which nobody tells
            squeeze(kept)
            seen += [other.clone().numpy() for other in others]
        return seen

    want = train(lambda *_: lambda _: None)
    with contextlib.ExitStack() as stack:
        got = train(lambda *targets: stack.enter_context(squeezed(*targets))[1])
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("spill", [False, True])
def test_training_is_bit_equal_whether_or_not_operators_are_heard(announced, spill, tmp_path):
    def train(steps, part=None):
        net = deep_net(8, 256)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
        size = sum(parameter.nbytes for parameter in net.parameters()) * 4  # with gradients and states
        with contextlib.ExitStack() as stack:
            if part is not None:
                where = {"spill": tmp_path} if spill else {}
                budget = stack.enter_context(reef.budget(MANY, net, optimizer, **where))
                others = live(budget) - size // 4
                budget.set_bytes(others + size // part)
            for step in range(steps):
                optimizer.zero_grad()
                net(torch.full((64, 256), 0.1 * step)).pow(2).mean().backward()
                optimizer.step()
            if part is not None:
                assert budget.use().evictions > 0
                assert budget.use().unannounced > 0 or announced
        return [parameter.detach().clone() for parameter in net.parameters()]

    want = train(6)
    for part in (2, 3):
        torch.autograd._enable_record_function(announced)
        try:
            got = train(6, part)
        finally:
            torch.autograd._enable_record_function(True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_working_set_beyond_the_budget_is_slow_or_with_strict_refused():
    program = """
        import torch, reef
        torch.manual_seed(0)
        data = [torch.randn(100_000) for _ in range(12)]
        want = [tensor * 2 for tensor in data]
        with reef.budget(2_000_000, data, strict={strict}) as budget:
            torch._foreach_mul_(data, 2)
            use = budget.use()
            assert use.peak_bytes <= 2_000_000 and use.unannounced > 0
            print(budget.report())
        assert all(torch.equal(a, b) for a, b in zip(data, want))
    """
    done = run(textwrap.dedent(program).format(strict=False))
    assert done.returncode == 0 and "touched while away" in done.stdout, (done.stdout, done.stderr)
    done = run(textwrap.dedent(program).format(strict=True))
    assert done.returncode != 0 and "out of memory" in done.stderr, (done.stdout, done.stderr)


def test_pages_that_are_large_for_what_their_budget_has_become():
    """Hardly anything can leave for another, so what is touched comes beside the budget."""
    with reef.budget(MANY) as budget:
        data = [torch.full((6000,), float(i)) for i in range(12)]
        budget.set_bytes(60_000)
        assert budget.use().live_bytes <= 60_000
        views = [tensor.numpy() for tensor in data]
        for view in views:
            view *= 2
        total = sum(left + right for left, right in zip(views, reversed(views), strict=True))
        budget.set_bytes(MANY)
        assert [tensor.sum().item() for tensor in data] == [6000 * 2.0 * i for i in range(12)]
        assert (total == 2 * 2 * sum(range(12))).all()


def test_older_tensors_that_fill_no_frame_leave_when_nothing_else_can():
    small = [torch.full((512,), float(i)) for i in range(2000)]
    large = torch.ones(250_000)
    with reef.budget(MANY, small, [large]) as budget:
        before = live(budget)
        budget.set_bytes(before - 900_000)
        assert all(tensor.numpy()[0] == i for i, tensor in enumerate(small)), "the large one has left, in part"
        budget.set_bytes(MANY)
    small = [torch.full((512,), float(i)) for i in range(2000)]  # numpy() has made the others stay
    with reef.budget(MANY, small) as budget:
        budget.set_bytes(live(budget) - 1000 * 2048)
        assert budget.use().evictions >= 1000
        for tensor in small:
            tensor.add_(1)
        assert all(tensor.sum().item() == 512 * (i + 1) for i, tensor in enumerate(small))


def test_threads_that_fault_with_pythons_lock_held():
    data = tensors(size=20_000)
    views = [tensor.numpy() for tensor in data]
    want = [view.tobytes() for view in views]
    wrong = []
    over = threading.Event()

    def read(seed):
        draws = random.Random(seed)
        while not over.is_set():
            i = draws.randrange(len(data))
            if views[i].tobytes() != want[i]:
                wrong.append(i)

    with squeezed(data) as (budget, squeeze):
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            squeeze(data)
            time.sleep(0.02)
            torch.stack([tensor.mean() for tensor in data])
        over.set()
        for thread in threads:
            thread.join()
        assert budget.use().unannounced > 0
    assert wrong == []


def test_data_loaders_read_what_their_parent_evicted():
    data = torch.utils.data.TensorDataset(torch.stack(tensors(count=64, size=50_000)))
    want = torch.stack(tensors(count=64, size=50_000))
    features = data.tensors[0]
    with squeezed(features) as (budget, squeeze):
        squeeze([features])
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
        for epoch in range(2):
            got = []
            for (batch,) in loader:
                squeeze([features])
                got.append(batch)
            budget.set_bytes(MANY)
            assert torch.equal(torch.cat(got), want)


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "REEF_ADDRESSES": "stay", **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def test_memory_that_cannot_come_back_ends_the_process_and_says_why(tmp_path):
    done = run(
        f"""
        import os, torch, reef
        net = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
        view = net[0].weight.detach().numpy()
        budget = reef.budget(1 << 40, net, spill={str(tmp_path)!r}).start()
        budget.set_bytes(budget.use().live_bytes // 2)
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{{name}}"
            if os.path.exists(path) and "(deleted)" in os.readlink(path) and {str(tmp_path)!r} in os.readlink(path):
                os.truncate(path, 0)
        print(view.sum())
        print("went on")
        """
    )
    assert done.returncode == -7, done.stderr  # SIGBUS
    assert "went on" not in done.stdout
    assert "'0.weight'" in done.stderr and "cannot come back" in done.stderr and "swap file" in done.stderr


def test_compiled_steps():
    """What a compiled graph reads and writes no operator announces."""

    def train(budget_part):
        torch._dynamo.reset()
        gc.collect()
        others = reef.allocator_live_bytes()  # of earlier tests
        net = deep_net(layers=4, width=192)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
        compiled = torch.compile(net)
        ledger = reef.Ledger()
        ledger.reset_peak()
        base = reef.allocator_live_bytes()
        with contextlib.ExitStack() as stack:
            if budget_part:
                budget = stack.enter_context(reef.budget(budget_part + others, net, optimizer))
            losses = []
            for step in range(6):
                torch.manual_seed(step)
                loss = compiled(torch.randn(64, 192)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if budget_part:
                assert budget.use().evictions > 50
                budget.set_bytes(MANY)
            return losses, [p.detach().clone() for p in net.parameters()], ledger.peak().total - base

    losses, parameters, peak = train(None)
    for part in (2, 3):
        got_losses, got, _ = train(int(sum(p.nbytes for p in parameters) + peak) // part)
        assert got_losses == losses
        assert all(map(torch.equal, got, parameters))


def test_nothing_is_left_of_a_swap_file_when_the_process_is_killed(tmp_path):
    program = f"""
        import torch, reef
        with reef.budget(2_000_000, spill={str(tmp_path)!r}):
            kept = [torch.full((50_000,), float(i)) for i in range(40)]
            print("evicting", flush=True)
            while True:
                for tensor in kept:
                    tensor.add_(1)
    """
    for seed in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert process.stdout.readline() == "evicting\n"
        time.sleep(random.Random(seed).random() / 3)
        process.kill()
        assert process.wait() == -9
        process.stdout.close()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("retried", [False, True])
def test_system_calls_are_made_once_more_where_the_program_asks_for_it(retried, tmp_path):
    """Where only the program's own code waits for what is away: csrc/userfault/retry_calls.cpp."""
    done = run(
        f"""
        import errno, os, socket, torch, reef
        tensors = [torch.full((50_000,), float(i)) for i in range(12)]
        with reef.budget(1 << 40, tensors) as budget:
            assert budget.addresses.startswith("stay, but not")
            # From the first whole frame on: what lies before is there, and a call that has moved some bytes does not fail.
            views = [memoryview(tensor.numpy()).cast("B")[-tensor.data_ptr() % 4096 :] for tensor in tensors]
            ends = socket.socketpair()
            ends[1].setblocking(False)  # what could not be sent does not come
            file = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT)
            failed = 0
            for call in (
                lambda view: os.write(file, view),
                lambda view: os.pwritev(file, [view, view], 0),
                lambda view: ends[0].send(view[:4096]),
                lambda view: os.preadv(file, [view], 0),
                lambda view: ends[1].recv_into(view[:4096]),
            ):
                budget.set_bytes(1 << 40)
                budget.set_bytes(budget.use().live_bytes // 4)
                for view in views:
                    try:
                        call(view)
                    except BlockingIOError:
                        pass
                    except OSError as error:
                        assert error.errno == errno.EFAULT
                        failed += 1
            budget.set_bytes(1 << 40)
            print(failed)
        """,
        REEF_ADDRESSES="stay-user",
        **({"LD_PRELOAD": str(reef.retry_library())} if retried else {}),
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 0 if retried else int(done.stdout) > 10


def test_memory_that_was_freed_is_not_read_by_accident():
    done = run(
        """
        import ctypes, torch, reef
        budget = reef.budget(1 << 40).start()
        tensor = torch.ones(1_000_000)
        address = tensor.data_ptr()
        budget.set_bytes(budget.use().live_bytes // 2)
        del tensor
        print(ctypes.c_float.from_address(address).value)
        """
    )
    assert done.returncode == -7, (done.stdout, done.stderr)
    assert "used after it was freed" in done.stderr


def test_mappings_do_not_grow_with_pages():
    def mappings():
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)

    with squeezed() as (budget, squeeze):
        data = [torch.ones(16_384) for _ in range(2_000)]
        before = mappings()
        squeeze(data)
        for i in range(0, 2_000, 3):
            assert data[i].numpy()[-1] == 1
        assert budget.use().evictions > 500
        assert mappings() < before + 100


# As Docker's default profile: userfaultfd(2) is refused with EPERM. x86-64's number of it is 323.
FILTER = """
import ctypes, os, platform, struct
if platform.machine() != "x86_64" or os.getuid() != 0:
    print("skip")
    raise SystemExit
libc = ctypes.CDLL(None)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
def filter_userfaultfd():
    load, equal, answer = (0x20, 0, 0, 0), (0x15, 0, 1, 323), 0x06
    steps = [load, equal, (answer, 0, 0, 0x00050001), (answer, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Program(len(steps), code)), 0, 0) == 0
def become_nobody():
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
"""
WORKS = """
import reef, torch
print(reef.addresses_here())
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
with reef.budget("1500KiB", net, addresses="automatic") as budget:
    for _ in range(3):
        net(torch.ones(8, 256)).sum().backward()
        net.zero_grad()
    print(budget.use().evictions > 0, budget.addresses == reef.addresses_here())
"""


@pytest.mark.parametrize(
    ("rights", "answer"),
    [
        ("", "stay\n"),
        ("filter_userfaultfd()", "stay\n"),  # by the device
        ("become_nobody()", "stay, but not for system calls: userfaultfd for system calls is refused"),
        ("filter_userfaultfd(); become_nobody()", "go: userfaultfd for system calls is refused"),
    ],
)
def test_the_best_way_that_a_process_may_have_is_chosen_and_the_reason_said(rights, answer):
    import_all = "import reef, torch\ntorch.ones(2, requires_grad=True).sum().backward()"  # while files may be read
    done = run(f"{FILTER}\n{import_all}\n{rights}\n{WORKS}", REEF_ADDRESSES="")
    if done.stdout == "skip\n":
        pytest.skip("needs root on x86-64")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(answer) and done.stdout.endswith("True True\n"), done.stdout
    assert answer == "stay\n" or "docker run --device /dev/userfaultfd" in done.stdout
