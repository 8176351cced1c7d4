"""One rank of tests/python/test_uneven.py: `uneven_ranks.py SCENE STAGE`. The last rank has one batch less than the others."""

import re
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import reef

TIMEOUT = 1500.0
"""Of the group: a row that waits for it is too late."""
SLOW = 3.5
"""Several signs of life."""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down = torch.nn.Linear(24, 101), torch.nn.LayerNorm(101), torch.nn.Linear(101, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))).pow(2).mean()


class Run:
    """A module that has taken two steps on all ranks, in a group of its own."""

    def __init__(self, stage: int) -> None:
        self.group = reef.init_process_group(timeout_seconds=TIMEOUT)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.net, self.stage = Net(), stage
        self.shard = reef.shard(self.net, self.group, stage=stage, bucket_bytes="5KiB")
        self.optimizer = torch.optim.SGD(self.shard.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            self.step()

    def backward(self) -> None:
        torch.manual_seed(self.rank)
        self.net(torch.randn(2, 24)).backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def evaluate(self, batches: int = 1) -> None:
        with torch.no_grad():
            for _ in range(batches):
                self.net(torch.ones(2, 24))


FIRST_USE = r"the first use of parameters in step 3 of shard 1"
PASS = r"the backward pass of step 3 of shard 1"

ELSEWHERE: dict[str, tuple[Callable[[Run], object], str]] = {
    "a state dict": (lambda run: run.shard.full_state_dict(), r"full_state_dict\(\) of shard 1"),
    "the optimizer's state dict": (lambda run: run.shard.full_optimizer_state_dict(run.optimizer), r"a state dict or param_groups\(\) of shard 1"),
    "loading": (lambda run: run.shard.load_state_dict({}), r"a state dict or param_groups\(\) of shard 1"),
    "gather": (lambda run: run.shard.gather(), r"gather\(\) of shard 1"),
    "the end of the shard": (lambda run: run.shard.end(), r"gather\(\) of shard 1"),
    "a barrier": (lambda run: reef.barrier(run.group), "reef::barrier"),
    "an all-reduce": (lambda run: reef.all_reduce([torch.ones(3)], run.group), "reef::all_reduce"),
    "a broadcast to it": (lambda run: reef.broadcast([torch.ones(3)], run.group), "reef::broadcast"),
    "a subgroup": (lambda run: reef.subgroup(run.group, [0]), "reef::subgroup"),
    "another shard": (lambda run: reef.shard(Net(), run.group, stage=run.stage), "reef::shard"),
    "the norm": (lambda run: reef.clip_grad_norm_(run.shard.parameters(), 1.0, run.group), "."),
    "groups": (lambda run: run.shard.param_groups(lambda name, shape: {}), r"a state dict or param_groups\(\) of shard 1"),
    "a barrier after an evaluation": (lambda run: (run.evaluate(), reef.barrier(run.group)), "reef::barrier"),
    "an evaluation, and then a state dict": (
        lambda run: (run.evaluate(2), run.shard.full_state_dict()), r"full_state_dict\(\) of shard 1"),
}  # fmt: skip
"""What the last rank does in place of its third step, and how it is called."""


def elsewhere(stage: int) -> None:
    for name, (call, called) in ELSEWHERE.items():
        run = Run(stage)
        others = ", ".join(str(rank) for rank in range(run.size - 1))
        before = [None if p.grad is None else p.grad.clone() for p in run.shard.parameters()]
        began = time.monotonic()
        try:
            if run.rank == run.size - 1:
                call(run)
            else:
                run.backward()
        except RuntimeError as error:  # a DistError, but for what an operator finds in the place of a parameter
            told = str(error)
        else:
            raise AssertionError(f"{name}: nothing was told")
        where = FIRST_USE if stage and "evaluation" not in name else PASS
        pattern = rf"^rank {run.rank} of {run.size}: .* failed: the ranks are out of step: call \d+ that all make alike in this group is (.*)\. All ranks"
        said = re.search(pattern, told)
        assert said, f"{name}: {told}"
        for each in range(run.size - 1):  # on a slow machine one may not have said yet where it waits
            assert re.search(rf"{where} on ranks? [^a-z]*\b(and )?{each}\b|ranks? .*\b{each}\b.* not come to it yet", said[1]), f"{name}: {told}"
        assert re.search(rf"{called}.* on rank {run.size - 1}\b", said[1]) and f"{where} on rank" in said[1], f"{name}: {told}"
        print(f"{name}: {said[1]}")  # the same on all ranks
        assert time.monotonic() - began < TIMEOUT / 3, name
        for p, was in zip(run.shard.parameters(), before, strict=True):
            assert (p.grad is None) == (was is None) and (was is None or torch.equal(p.grad, was)), name
        try:  # all that comes after it
            reef.barrier(run.group)
            raise AssertionError("the group goes on")
        except dist.DistError as error:
            assert "out of step" in str(error), error
    print("done")


def late(stage: int) -> None:
    """A rank that is slow, wherever the others wait, is none that has gone elsewhere."""
    run = Run(stage)

    def wait_first() -> None:
        if run.rank == run.size - 1:
            time.sleep(SLOW)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            wait_first()
            return gradient

    wait_first()
    run.step()
    run.optimizer.zero_grad()
    loss = Slow.apply(run.net.up(torch.ones(2, 24)))
    wait_first()
    run.net.down(run.net.norm(loss)).pow(2).mean().backward()
    wait_first()
    reef.clip_grad_norm_(run.shard.parameters(), 1.0, run.group)
    run.optimizer.step()
    for call in (run.shard.full_state_dict, lambda: run.shard.full_optimizer_state_dict(run.optimizer),
                 lambda: reef.all_reduce([torch.ones(3)], run.group), lambda: reef.broadcast([torch.ones(3)], run.group),
                 lambda: reef.barrier(run.group), run.shard.gather, lambda: reef.subgroup(run.group, [0])):  # fmt: skip
        wait_first()
        call()
    wait_first()
    with run.shard.no_sync():
        run.backward()
        wait_first()
    run.step()
    wait_first()
    run.shard.end()
    print("done")


def evaluations(stage: int) -> None:
    """A rank that evaluates more than others has what it needs of them while they wait for it elsewhere."""
    run = Run(stage)
    waits: list[Callable[[], object]] = [
        lambda: reef.barrier(run.group), run.shard.full_state_dict, lambda: reef.all_reduce([torch.ones(3)], run.group),
        lambda: run.shard.full_optimizer_state_dict(run.optimizer), run.backward, run.shard.gather,
    ]  # fmt: skip
    for longest in (0, run.size - 1):
        for wait in waits:
            run.optimizer.zero_grad()
            run.step()
            run.evaluate()
            whole = {name: p.clone() for name, p in run.shard.full_state_dict().items()}
            if run.rank == longest:
                with torch.no_grad():
                    found = [run.net(torch.full((2, 24), float(batch))) for batch in range(5)]
                alone = Net()
                alone.load_state_dict(whole)
                assert all(torch.equal(alone(torch.full((2, 24), float(batch))), loss) for batch, loss in enumerate(found))
            wait()
    run.step()
    run.shard.end()
    print("done")


def threads(_stage: int) -> None:
    """Two threads of a program have two orders, which are not compared: on each rank another of them is first."""
    group = reef.init_process_group(timeout_seconds=TIMEOUT)
    rank, size = group.rank(), group.size()
    other = reef.subgroup(group, range(size))
    reef.barrier(other)
    values = torch.ones(2)

    def beside() -> None:
        time.sleep(0 if rank == size - 1 else SLOW)
        reef.broadcast([values], other)

    thread = threading.Thread(target=beside)
    thread.start()
    time.sleep(SLOW if rank == size - 1 else 0)
    reef.barrier(group)
    thread.join()
    reef.barrier(other)
    print("done")


SCENES = {"elsewhere": elsewhere, "late": late, "evaluations": evaluations, "threads": threads}

if __name__ == "__main__":
    SCENES[sys.argv[1]](int(sys.argv[2]))
