"""Programs made at random, each run plainly and inside a budget that changes all the time: what they compute is equal, bit
for bit, or they are refused with an error that says why. Beside training there are threads, forks, exceptions, budgets that
end, collectives, and code that reads memory without an operator."""

import contextlib
import faulthandler
import hashlib
import os
import random
import signal
import threading
import traceback

import pytest
import torch

import reef

MANY = 1 << 40
DEADLINE_SECONDS = 900  # of one test, on a slow machine


@pytest.fixture(autouse=True)
def deadline():
    faulthandler.dump_traceback_later(DEADLINE_SECONDS, exit=True)
    torch.set_num_threads(1)
    yield
    faulthandler.cancel_dump_traceback_later()


def refused(error: Exception) -> bool:
    """Beside other threads also where it reads between two operators without saying so."""
    return isinstance(error, reef.BudgetError) or "out of memory" in str(error) or "budget.whole" in str(error)


class Fails(Exception):
    """Raised by a program in the middle of something; it goes on."""


class Scaled(torch.autograd.Function):
    """Calls operators, reads memory by itself between them, and fails at times."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        address = x.data_ptr()
        y = x * 2 + x.flip(0) - x.flip(0)
        assert x.data_ptr() == address, "it is in use until the function ends"
        if fails == "forward":
            raise Fails
        return y

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails == "backward":
            raise Fails
        return gradient * 2, None


class Program:
    """What it does depends on its seed alone; `world` may get in its way."""

    def __init__(self, seed, world):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.world = world
        self.digest = hashlib.md5()
        self.parameters = [torch.nn.Parameter(self.draw(self.random.choice([64, 96]), 64)) for _ in range(5)]
        make = self.random.choice(
            [
                lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
                lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
                lambda p: torch.optim.ASGD(p, lr=0.1, foreach=False),
                lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=False),
            ]
        )
        self.optimizer = make(self.parameters)
        self.buffers = [self.draw(64, 64) for _ in range(3)]
        self.bag = []

    def draw(self, *size):
        return torch.randn(*size, generator=self.generator) * 0.1

    def saw(self, tensor):
        self.digest.update(str(tensor.detach().sum().item()).encode())

    def run(self, steps):
        kinds = [self.random.randrange(1000) for _ in range(3)]
        for _ in range(steps):
            self.world.between_steps(self)
            self.step(random.Random(kinds[0] if self.random.random() < 0.6 else self.random.choice(kinds)))
        for tensor in (*self.parameters, *self.buffers):
            self.digest.update(tensor.detach().clone().flatten().view(torch.uint8).sum().item().to_bytes(8, "little"))
            self.saw(tensor)
        return self.digest.hexdigest()

    def step(self, draws):
        self.optimizer.zero_grad(set_to_none=draws.random() < 0.5)
        x = self.draw(draws.choice([16, 64]), 64)
        try:
            for _ in range(draws.randrange(3, 8)):
                x = self.act(draws, x)
            loss = x.pow(2).mean() + self.parameters[0].pow(2).mean() * 1e-3
            loss.backward()
            self.optimizer.step()
            self.saw(loss)
        except Fails:
            self.digest.update(b"failed")

    def act(self, draws, x):
        what = draws.randrange(14)
        parameter = self.parameters[draws.randrange(5)]
        buffer = draws.randrange(3)
        if what <= 2:
            return torch.tanh(x @ parameter.t() @ parameter)
        if what == 3:
            return x + self.buffers[buffer][: x.shape[0] % 64 + 1].mean(0)
        if what == 4:
            with torch.no_grad():
                self.buffers[buffer].mul_(0.9).add_(x.detach().mean())
        elif what == 5:
            self.bag.append(x.detach())
        elif what == 6 and self.bag:
            return x + self.bag.pop(draws.randrange(len(self.bag))).mean()
        elif what == 7:
            return torch.cat([x, x.flip(0)], 0)[:64]
        elif what == 8:
            with torch.no_grad():
                parameter.data = parameter.data.clone()
        elif what == 9:
            self.buffers[buffer].resize_(draws.choice([64, 80]), 64).fill_(0.5)
        elif what == 10:
            return torch.nn.functional.layer_norm(x, (64,)) * 0.1
        elif what == 11:
            return Scaled.apply(x, draws.choice([None, None, None, "forward", "backward"]))
        elif what == 12:  # a storage that only Python owns for a moment
            storage = x.detach().clone().untyped_storage()
            return x + torch.tensor([], dtype=x.dtype).set_(storage).mean()
        elif what == 13:
            self.digest.update(self.world.read(x.detach().clone()))
        return x


class Nowhere:
    """No budget."""

    def between_steps(self, program):
        pass

    def read(self, tensor):
        return bytes(tensor.numpy().tobytes())


class Inside(Nowhere):
    """A budget that changes, ends and begins."""

    def __init__(self, seed, may_end):
        self.random = random.Random(seed)
        self.may_end = may_end
        self.budget = reef.budget(MANY, prefetch=self.random.random() < 0.7, restore=True)
        self.evictions = 0

    def between_steps(self, program):
        if self.may_end and self.random.random() < 0.1:
            self.evictions += self.budget.use().evictions
            self.budget.set_bytes(MANY)  # with which it starts the next time
            self.budget.stop()
            with pytest.raises(ValueError, match="not in force"):
                self.budget.set_bytes(MANY)
            self.budget.start()
        if self.random.random() < 0.5:
            squeeze(self.budget, self.random)

    def read(self, tensor):
        with self.budget.whole(tensor):
            return bytes(tensor.numpy().tobytes())


def squeeze(budget, draws):
    try:
        budget.set_bytes(budget.use().live_bytes + draws.choice([50_000, 100_000, 200_000, 400_000]))
    except reef.BudgetError:
        budget.set_bytes(MANY)


def run_inside(world, program_of, want):
    """"equal", "refused", or a failure."""
    world.budget.start()
    try:
        got = program_of(world).run(6)
    except RuntimeError as error:
        assert refused(error), error
        return "refused"
    finally:
        world.budget.set_bytes(MANY)
        world.evictions += world.budget.use().evictions
        world.budget.stop()
    assert got == want
    return "equal"


def test_programs_one_after_another():
    found = {"equal": 0, "refused": 0}
    evictions = 0
    for seed in range(4500):
        want = Program(seed, Nowhere()).run(6)
        world = Inside(seed, may_end=True)
        try:
            found[run_inside(world, lambda world, seed=seed: Program(seed, world), want)] += 1
        except AssertionError as error:
            raise AssertionError(f"program {seed}") from error
        evictions += world.evictions
    assert found["equal"] > 2000
    assert evictions > 20_000


def test_programs_on_several_threads():
    """Training and evaluation at once, while other threads drop what they were given and change the budget."""
    seeds = range(40)
    want = {seed: Program(seed, Nowhere()).run(6) for seed in seeds}
    shared = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
    evaluated = torch.digamma(shared + 1).sum().item()
    dropped, wrong, found = [], [], []
    over = threading.Event()

    class Beside(Nowhere):
        def between_steps(self, program):
            dropped.extend(torch.ones(600) * program.parameters[0][0, 0].detach() for _ in range(3))

        def read(self, tensor):
            with budget.whole(tensor):
                return bytes(tensor.numpy().tobytes())

    def train(first):
        draws = random.Random(first)
        for _ in range(250):
            seed = draws.choice(seeds)
            try:
                found.append(Program(seed, Beside()).run(6) == want[seed])
            except RuntimeError as error:
                if not refused(error):
                    wrong.append(error)
                    raise

    def evaluate():
        while not over.is_set():
            try:
                with torch.no_grad():
                    found.append(torch.digamma(shared + 1).sum().item() == evaluated)
            except RuntimeError as error:
                if not refused(error):
                    wrong.append(error)
                    raise

    def drop():
        while not over.is_set():
            while dropped:
                dropped.pop()
            over.wait(0.001)

    def change():
        draws = random.Random(3)
        while not over.is_set():
            over.wait(0.002)
            squeeze(budget, draws)

    with reef.budget(MANY) as budget:
        training = [threading.Thread(target=train, args=(first,)) for first in range(3)]
        beside = [threading.Thread(target=target) for target in (evaluate, drop, change)]
        for thread in (*training, *beside):
            thread.start()
        for thread in training:
            thread.join()
        over.set()
        for thread in beside:
            thread.join()
        budget.set_bytes(MANY)
        evictions = budget.use().evictions
    assert wrong == []
    assert len(found) > 800 and all(found)
    assert evictions > 5_000


def fork_each(count, child):
    """Forks so many children, one after another, which call `child(number)` and end with 0 if that is true."""
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            end_by(120)
            right = False
            try:
                right = child(number)
            except BaseException:  # noqa: BLE001 (what the parent does next is not for its child)
                traceback.print_exc()
            os._exit(0 if right else 1)
        assert os.waitpid(pid, 0)[1] == 0, number


def end_by(seconds):
    """Ends a forked child that hangs: the parent's deadline ends none of its children."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


@pytest.mark.parametrize("tier", ["host", "threads", "uring"])
def test_programs_that_fork(tier, tmp_path, capfd):
    """Children read what their parent computed, train, and start budgets of their own, while the parent's threads go on.
    One that is forked while a thread holds LibTorch's lock for observers cannot train, and ends with a message."""

    def tiers():
        return [reef.host_tier()] if tier == "host" else [reef.disk_tier(tmp_path, "1GiB", io=tier)]

    def child(features, seed, want, write):
        end_by(300)  # on a slow machine
        try:
            kind = seed % 4
            if kind == 0:
                with pytest.raises(ValueError, match="forked"):
                    budget.set_bytes(MANY)
            if kind == 1:
                budget.stop()
            if kind == 2:
                reef.pin(features[0])
            if kind == 3:
                with reef.budget(MANY, features) as own:
                    assert all((feature == i).all().item() for i, feature in enumerate(features))
                    own.set_bytes(own.use().live_bytes - 100_000)
            right = all((feature.clone() == i).all().item() for i, feature in enumerate(features))
            right = right and Program(seed, Nowhere()).run(6) == want
            os.write(write, b"right" if right else b"wrong")
        except BaseException as error:  # noqa: BLE001 (the parent reports it)
            os.write(write, repr(error).encode()[:1000])
        os._exit(0)

    seeds = range(40)
    without_lock = 0
    want = {seed: Program(seed, Nowhere()).run(6) for seed in seeds}
    over = threading.Event()

    def work():  # locks are held, and transfers are under way, at any moment
        draws = random.Random(1)
        while not over.is_set():
            with contextlib.suppress(reef.BudgetError):
                kept = [torch.ones(draws.choice([500, 50_000, 200_000])) * weight.detach().mean() for _ in range(4)]
                del kept

    weight = torch.nn.Parameter(torch.ones(1000))
    features = [torch.full((40_000,), float(i)) for i in range(8)]
    try:
        budget = reef.budget(MANY, weight, features, tiers=tiers()).start()
    except ValueError as error:
        pytest.skip(str(error))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for seed in seeds:
            try:
                budget.set_bytes(max(budget.use().live_bytes - 1_000_000, 0))
            except reef.BudgetError:
                pass
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                child(features, seed, want[seed], write)
            os.close(write)
            answer = os.read(read, 1000)
            os.close(read)
            status = os.waitpid(pid, 0)[1]
            if not answer and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT:
                without_lock += 1
            else:
                assert answer == b"right", (seed, answer, status)
            budget.set_bytes(MANY)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        budget.set_bytes(MANY)
        budget.stop()
    assert all((feature == i).all() for i, feature in enumerate(features))
    assert without_lock == capfd.readouterr().err.count("held LibTorch's lock") < len(seeds) / 2


def test_forks_while_threads_begin():
    """A thread takes a lock of LibTorch's when it calls its first operator. A child in which that is held for ever runs
    operators all the same, and ends its budget; it begins one of its own, or is told why it cannot."""

    def child(number):
        if number % 3 == 1:
            budget.stop()
        if number % 3 == 2:
            try:
                with reef.budget(MANY, weight):
                    weight + 1
            except RuntimeError as error:
                assert "was forked while another thread" in str(error), error
        return (weight.clone() == 1).all()

    over = threading.Event()
    weight = torch.ones(1000)

    def begin_threads():
        while not over.is_set():
            threads = [threading.Thread(target=lambda: weight + 1) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    budget = reef.budget(MANY, weight).start()
    beginning = [threading.Thread(target=begin_threads) for _ in range(2)]
    for thread in beginning:
        thread.start()
    try:
        fork_each(60, child)
    finally:
        over.set()
        for thread in beginning:
            thread.join()
        budget.stop()


def test_forks_while_a_thread_evicts():
    """Large pages are always on their way, being copied or being hashed. A child ends the budget, or writes them."""

    def child(number):
        if number % 2 == 0:
            budget.stop()
        for tensor in large:
            tensor.add_(1)
        return all((tensor == 2).all() for tensor in large)

    over = threading.Event()
    large = [torch.ones(4 << 20) for _ in range(3)]

    def evict():
        while not over.is_set():
            with contextlib.suppress(reef.BudgetError):
                budget.set_bytes(budget.use().live_bytes - 40_000_000)
            budget.set_bytes(MANY)

    budget = reef.budget(MANY, large).start()
    evicting = threading.Thread(target=evict)
    evicting.start()
    try:
        fork_each(20, child)
    finally:
        over.set()
        evicting.join()
        evictions = budget.use().evictions
        budget.stop()
    assert evictions > 20
    assert all((tensor == 1).all() for tensor in large)
