"""One rank of tests/python/test_subgroup.py and test_point_to_point.py: `group_ranks.py SCENE ARGUMENT...`."""

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from waits import HEARTBEAT_SECONDS, SHORT_SECONDS, stop

import reef

VICTIM = 1
LONG = 8_000_000  # elements of a message that is nearly always under way


def refusal(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def ring(group, seed: int) -> None:
    """Every member sends to the next one."""
    rank, size = group.rank(), group.size()
    if size == 1:
        return
    under_way = reef.isend(torch.arange(seed) + rank, (rank + 1) % size, group, tag=seed)
    came = reef.receive((rank - 1) % size, group, tag=seed)
    assert torch.equal(came, torch.arange(seed) + (rank - 1) % size)
    assert under_way.wait().shape == (seed,)


def check_group(group, ranks: list[int], rank: int, of) -> None:
    assert (group is not None) == (rank in ranks)
    if group is None:
        return
    if len(ranks) > 1:
        assert {str(each) for each in group._device_types} == {str(each) for each in of._device_types}
    assert (group.rank(), group.size()) == (ranks.index(rank), len(ranks))
    one = torch.tensor([10**rank])
    reef.all_reduce([one], group)
    assert one.item() == sum(10**each for each in ranks)
    ring(group, 5)


def subgroups(group) -> None:
    rank, size = group.rank(), group.size()
    for ranks in ([*range(size)], [*range(size)][::-1], [size - 1], [0, size - 1][: min(size, 2)], range(min(2, size))):
        made = reef.subgroup(group, ranks)
        check_group(made, list(ranks), rank, group)
        if made is not None:
            check_group(reef.subgroup(made, [*range(made.size())][::-1]), list(ranks)[::-1], rank, group)
    assert "rank 0 stands twice" in refusal(lambda: reef.subgroup(group, [0, 0]))
    assert "no ranks" in refusal(lambda: reef.subgroup(group, []))
    if size > 1:
        text = refusal(lambda: reef.subgroup(group, [0] if rank == size - 1 else [0, 1]))
        assert "[0, 1] on rank 0" in text and f"[0] on rank {size - 1}" in text, text
        text = refusal(lambda: reef.subgroup(group, ["0"] if rank == 0 else torch.tensor([0, 1])))
        assert "[] on rank 0 and [0, 1] on rank 1" in text, text
    for call in (lambda: reef.subgroup(None, [0]), lambda: reef.barrier(None), lambda: reef.receive(0, None)):
        assert "not a member" in refusal(call)
    check_group(reef.subgroup(group, [0]), [0], rank, group)


def messages(group) -> None:
    rank, size = group.rank(), group.size()
    assert "another rank" in refusal(lambda: reef.send(torch.ones(1), rank, group))
    assert "rank -1" in refusal(lambda: reef.receive(-1, group))
    if rank == 0:
        for to in range(1, size):
            leaf = torch.arange(6.0, requires_grad=True)
            reef.send((leaf * 2).reshape(2, 3).T, to, group, tag=1)
            reef.send(torch.tensor(True), to, group)
            text = refusal(lambda to=to: reef.send(torch.ones(2, 3), to, group))
            assert "Float [2, 3]" in text and "Double [3]" in text, text
            text = refusal(lambda to=to: reef.isend(torch.ones(4), to, group, tag=7).wait())
            assert "tag 7" in text and "tag 8" in text, text
            reef.send(torch.full((2,), 3.0), to, group, tag=-(2**62))
            time.sleep(0.5)
            reef.send(torch.ones(1), to, group)
    else:
        came = reef.receive(0, group, tag=1)
        assert came.is_contiguous() and not came.requires_grad
        assert torch.equal(came, (torch.arange(6.0) * 2).reshape(2, 3).T)
        assert reef.receive(0, group).dtype == torch.bool
        into = torch.zeros(3, dtype=torch.float64)
        text = refusal(lambda: reef.receive_into(into, 0, group))
        assert "Float [2, 3]" in text and "Double [3]" in text and into.sum() == 0, text
        text = refusal(lambda: reef.ireceive(0, group, tag=8).wait())
        assert "tag 7" in text and "tag 8" in text, text
        parameter = torch.nn.Parameter(torch.zeros(2))
        assert reef.receive_into(parameter, 0, group, tag=-(2**62)) is parameter and parameter.sum() == 6
        goes_on = threading.Event()  # Python's lock is not held while a rank waits
        threading.Timer(0.05, goes_on.set).start()
        message = reef.ireceive_into(torch.zeros(1), 0, group)
        assert message.wait() == 1 and message.is_through() and goes_on.is_set()


def shard_over_a_subgroup(group) -> None:
    """Half of the ranks train one model, as if they were alone."""
    size = group.size()
    half = reef.subgroup(group, range(size // 2, size))
    if half is None:
        return

    def trained(ranks: list[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        parameters = model.parameters() if group is None else reef.shard(model, group, stage=2).parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for each in ranks:
            loss = model(torch.full((1, 3), each + 1.0)).sum()
            (loss if group is not None else loss / len(ranks)).backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    alone = trained([*range(half.size())], None)
    for found, right in zip(trained([half.rank()], half), alone, strict=True):
        assert torch.allclose(found, right), (found, right)


def face() -> None:
    group = reef.init_process_group()
    subgroups(group)
    messages(group)
    shard_over_a_subgroup(group)


def meet_in_a_file(path: str) -> dist.ProcessGroup:
    return reef.init_process_group(
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), store=f"file://{path}"
    )


def in_a_file(path: str) -> None:
    group = meet_in_a_file(path)
    subgroups(group)
    messages(group)


def by_torch() -> None:
    """Groups of torch.distributed's own."""
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    subgroups(world)
    messages(world)
    size = dist.get_world_size()
    pair = dist.new_group([0, size - 1])
    if dist.get_rank() in (0, size - 1):
        subgroups(pair)
        messages(pair)
    shard_over_a_subgroup(world)
    dist.barrier()
    dist.destroy_process_group()


def die(way: str) -> None:
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "stop, then kill":
        stop(then="sleep 2; kill -KILL")
    else:
        stop()


def fault(where: str, way: str, number: str) -> None:
    """The victim is gone at `where`; the others go on to what they wait in, and say what they are told."""
    victim = int(number)
    group = reef.init_process_group(heartbeat_seconds=HEARTBEAT_SECONDS, timeout_seconds=900)
    rank, size = group.rank(), group.size()
    lost = rank == victim
    others = [each for each in range(size) if each != victim]
    pair = reef.subgroup(group, [size - 1, victim])
    deep = None if pair is None else reef.subgroup(pair, [1, 0])
    last = rank == size - 1
    goes_on = {
        "while groups come up": lambda: reef.subgroup(group, [2, 0, 1]),
        "while messages go": lambda: ring(group, 50000),
        "while a collective goes on": lambda: reef.all_reduce([torch.ones(LONG)], group),
    }
    try:
        if where in goes_on:
            if lost:
                threading.Timer(0.3, lambda: die(way)).start()
            while True:
                goes_on[where]()
        if lost:
            die(way)
        if where == "before a subgroup":
            reef.subgroup(group, others)
        elif where == "before it sends":
            reef.receive(victim, group)
        elif where == "before it receives":
            reef.send(torch.ones(3_000_000), victim, group)
        elif where == "with messages under way":
            for message in [reef.isend(torch.ones(9), victim, group), reef.ireceive(victim, group)]:
                message.wait()
        elif where == "in a subgroup":
            reef.all_reduce([torch.ones(3)], pair) if last else reef.barrier(group)
        elif where == "in a subgroup of a subgroup":
            reef.receive(0, deep) if last else reef.barrier(group)
        raise AssertionError("nobody missed the one that is gone")
    except dist.DistError as error:
        print("told:", str(error).splitlines()[0])


def half_through(of: str, number: str, path: str) -> None:
    """The victim sends long messages, stops within one of them, and then ends."""
    if of == "torch":
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    elif of == "file":
        group = meet_in_a_file(path)
    else:
        group = reef.init_process_group(heartbeat_seconds=0 if of == "without heartbeat" else 10)
    victim = int(number)
    values = torch.zeros(LONG)
    if group.rank() == victim:
        threading.Timer(0.5, lambda: die("stop, then kill")).start()
        while True:
            reef.send(values, 1 - victim, group)
    try:
        while True:
            reef.receive_into(values, victim, group)
    except dist.DistError as error:
        print("told:", str(error).splitlines()[0])


def others_end_early() -> None:
    """Who has nothing more to do ends; what the others do goes on, and a death among them is named."""
    group = reef.init_process_group(heartbeat_seconds=1, timeout_seconds=120)
    rank = group.rank()
    pair = reef.subgroup(group, [0, 1])
    if pair is None:
        return
    del group
    time.sleep(1)
    if rank == 1:
        time.sleep(4)
        reef.send(torch.ones(1), 0, pair)
        die("kill")
    assert reef.receive(1, pair).item() == 1
    try:
        reef.receive(1, pair)
    except dist.DistError as error:
        print("told:", str(error).splitlines()[0])


def without_sockets() -> None:
    """A member that may open no more: all are told, and the group is as before."""
    group = reef.init_process_group(timeout_seconds=120)
    rank = group.rank()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == VICTIM:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
    for _ in range(3):
        try:
            reef.subgroup(group, [2, VICTIM])
            raise AssertionError("there was room")
        except dist.DistError as error:
            told = str(error).splitlines()[0]
            assert told.startswith("rank 1 of 3 could not join the subgroup of ranks [2, 1]: "), told
            assert "more files and sockets" in told, told
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    subgroups(group)


def late() -> None:
    """A subgroup has the timeout of what it is of."""
    group = reef.init_process_group(timeout_seconds=SHORT_SECONDS)
    pair = reef.subgroup(reef.subgroup(group, [1, 0]), [1, 0])
    if group.rank() == 1:
        time.sleep(2 * SHORT_SECONDS)
    try:
        reef.receive(1 - group.rank(), pair)
        raise AssertionError("nobody waited in vain")
    except dist.DistError as error:
        print("told:", str(error).splitlines()[0])


def comes_late() -> None:
    """Messages have the group's timeout, however much of it was over when the group was up."""
    late = os.environ["RANK"] == "1"
    if late:
        time.sleep(SHORT_SECONDS)
    group = reef.init_process_group(timeout_seconds=2 * SHORT_SECONDS)
    if late:
        time.sleep(1.25 * SHORT_SECONDS)
        reef.send(torch.ones(1), 0, group)
    else:
        assert reef.receive(1, group).item() == 1


SCENES = {scene.__name__: scene for scene in (face, in_a_file, by_torch, fault, half_through, others_end_early, without_sockets, late,
                                            comes_late)}

if __name__ == "__main__":
    SCENES[sys.argv[1]](*sys.argv[2:])
    print("done")
