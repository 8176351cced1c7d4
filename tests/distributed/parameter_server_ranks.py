"""One rank of tests/python/test_parameter_server.py: `parameter_server_ranks.py WHAT SERVERS FOLDER`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from waits import HEARTBEAT_SECONDS, stop

import reef

STEPS = 6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = torch.nn.Linear(24, 101), torch.nn.Linear(101, 24)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.relu(self.up(x))) * self.frozen[0]).pow(2).mean()


def batch(worker: int, clock: int) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * worker + clock))


def trained(net: Net) -> list[torch.Tensor]:
    return [p for p in net.parameters() if p.requires_grad]


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def synchronously(workers: int, steps: int) -> Net:
    net = Net()
    optimizer = adam(trained(net))
    for step in range(steps):
        optimizer.zero_grad()
        for worker in range(workers):
            net(batch(worker, step)).backward()
        for p in trained(net):
            p.grad.div_(workers)
        optimizer.step()
    return net


def synchronous(group, servers: int, folder: Path) -> None:
    """Bit for bit what one process does."""
    workers = group.size() - servers
    if group.rank() < servers:
        server = reef.ParameterServer(group, servers=servers)
        server.serve(adam([server.parameter]))
        assert server.log().staleness_histogram() == [STEPS * workers]
        assert server.removed() == [] and server.next() is None
        return
    net = Net()
    with reef.AsyncWorker(net, group, servers=servers) as worker:
        for step in range(STEPS):
            worker.pull()
            net(batch(group.rank() - servers, step)).backward()
            worker.push()
            assert all(p.grad is None for p in trained(net))
        worker.pull()
        assert worker.clock() == STEPS
    expected = synchronously(workers, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(trained(net), trained(expected), strict=True))


def replays(group, servers: int, folder: Path) -> None:
    """Every rule; the log of a real run, read from a file, gives its bits once more."""
    for rule in reef.ASYNC_RULES:
        for staleness in (0, 2, None):
            replay_one(group, servers, rule, staleness, folder)


def flat_places(servers: int) -> tuple[list[slice], int]:
    """Where each parameter lies, and how long a slice is: everything from a multiple of 256 elements on."""
    places, end = [], 0
    for p in trained(Net()):
        places.append(slice(end, end + p.numel()))
        end += -(-p.numel() // 256) * 256
    return places, -(-end // (256 * servers)) * 256


def replay_one(group, servers: int, rule: str, staleness: int | None, folder: Path) -> None:
    options = dict(servers=servers, rule=rule, staleness=staleness, compensation=0.5)
    rank = group.rank()
    elastic = rule == "elastic"
    run = f"{rule}_{staleness}"
    if rank < servers:
        server = reef.ParameterServer(group, **options)
        server.serve(None if elastic else adam([server.parameter]))
        expect_replay(server, rank, servers, folder / run)
        return
    net = Net()
    with reef.AsyncWorker(net, group, **options) as worker:
        for step in range(STEPS):
            if step == 0 or not elastic:
                worker.pull()
            time.sleep(0.003 * (rank * step % 3))
            net(batch(rank - servers, worker.clock())).backward()
            if elastic:
                with torch.no_grad():
                    for p in trained(net):
                        p.sub_(0.05 * p.grad)
                        p.grad = None
            worker.push()


def expect_replay(server: reef.ParameterServer, rank: int, servers: int, run: Path) -> None:
    """Servers leave their logs and slices in files, which rank 0 reads: its own process has their bits once more."""
    unfinished = Path(f"{run}_{rank}.unfinished")
    torch.save({"log": server.log().text, "slice": server.parameter.detach()}, unfinished)
    unfinished.rename(f"{run}_{rank}.pt")
    if rank != 0:
        return
    while not all(Path(f"{run}_{each}.pt").exists() for each in range(servers)):
        time.sleep(0.02)
    elastic = " rule elastic " in server.log().text
    saved = [torch.load(f"{run}_{each}.pt") for each in range(servers)]
    places, elements = flat_places(servers)
    net = Net()
    begin = torch.zeros(servers * elements)
    for place, p in zip(places, trained(net), strict=True):
        begin[place] = p.detach().flatten()
    stepped = [begin[i * elements : (i + 1) * elements].clone().requires_grad_() for i in range(servers)]
    optimizers = [adam([p]) for p in stepped]

    def push(worker: int, clock: int, given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for place, p in zip(places, trained(net), strict=True):
                p.copy_(given[place].view(p.shape))
                p.grad = None
        with torch.enable_grad():
            net(batch(worker, clock)).backward()
        made = given.clone() if elastic else torch.zeros_like(given)
        for place, p in zip(places, trained(net), strict=True):
            made[place] = (p.detach() - 0.05 * p.grad if elastic else p.grad).flatten()
        return made

    def step(server: int, slice_: torch.Tensor, gradient: torch.Tensor, rate: float) -> torch.Tensor:
        stepped[server].grad = gradient
        optimizers[server].param_groups[0]["lr"] = 0.01 * rate
        optimizers[server].step()
        return stepped[server].detach()

    logs = [reef.AsyncLog(each["log"]) for each in saved]
    begins = [begin[i * elements : (i + 1) * elements] for i in range(servers)]
    ends = reef.replay_async(logs, begins, push, step)
    for end, each in zip(ends, saved, strict=True):
        assert torch.equal(end, each["slice"]), f"{run}\n{logs[0].text}"


def killed(group, servers: int, folder: Path) -> None:
    """The last worker is killed between a pull and a push: the server says so, and the others finish."""
    for_all = dict(servers=servers, staleness=1)
    last = group.size() - 1
    if group.rank() < servers:
        server = reef.ParameterServer(group, **for_all)
        server.serve(adam([server.parameter]))
        (rank, why), = server.removed()
        assert rank == last and f"rank {last} (process " in why and "has ended" in why, why
        pushes = [event for event in server.log().events if event.kind == "push"]
        assert sum(event.worker == last - servers for event in pushes) == 2
        assert len(pushes) == STEPS * (group.size() - servers - 1) + 2
        expect_replay(server, group.rank(), servers, folder / "killed")
        return
    net = Net()
    with reef.AsyncWorker(net, group, **for_all) as worker:
        for step in range(STEPS):
            worker.pull()
            if group.rank() == last and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            net(batch(group.rank() - servers, step)).backward()
            worker.push()


def stopped(group, servers: int, folder: Path) -> None:
    """The last worker stands still until the servers have removed it, and comes back."""
    for_all = dict(servers=servers, staleness=1)
    last = group.size() - 1
    back = folder / "back"
    if group.rank() < servers:
        server = reef.ParameterServer(group, **for_all)
        optimizer = adam([server.parameter])
        server.serve(optimizer)
        assert [rank for rank, _ in server.removed()] == [last], server.removed()
        assert f"no sign of life for {HEARTBEAT_SECONDS} s" in server.removed()[0][1], server.removed()
        kinds = [event.kind for event in server.log().events if event.worker == last - servers]
        assert "leave" in kinds and "join" in kinds and kinds.count("push") == 4, kinds
        expect_replay(server, group.rank(), servers, folder / "stopped")
        return
    net = Net()
    with reef.AsyncWorker(net, group, **for_all) as worker:
        step = pushed = 0
        while pushed < 4 if group.rank() == last else not back.exists():
            worker.pull()
            net(batch(group.rank() - servers, worker.clock())).backward()
            step += 1
            if group.rank() == last and step == 2:
                stop()
            try:
                worker.push()
                pushed += 1
            except torch.distributed.DistError as error:
                assert group.rank() == last and "call join()" in str(error), error
                worker.join()
            time.sleep(0.02)
        if group.rank() == last:
            assert step == 5
            back.touch()


def go(how: int, folder: Path, others: int) -> None:
    """A rank that is stopped is killed when all others have said what they were told."""
    own = os.getpid()
    if how == signal.SIGSTOP and os.fork() == 0:
        while len(list(folder.glob("told*"))) < others:
            time.sleep(0.05)
        os.kill(own, signal.SIGKILL)
        os._exit(0)
    os.kill(own, how)


def server_lost(group, servers: int, folder: Path, how: int) -> None:
    """The last server goes: all that are left raise, and name it."""
    lost = servers - 1
    try:
        if group.rank() < servers:
            server = reef.ParameterServer(group, servers=servers, staleness=1)
            optimizer = adam([server.parameter])
            steps = 0
            while server.next() is not None:
                optimizer.step()
                steps += 1
                if group.rank() == lost and steps == 4:
                    go(how, folder, group.size() - 1)
        else:
            net = Net()
            with reef.AsyncWorker(net, group, servers=servers, staleness=1) as worker:
                for step in range(10**6):
                    worker.pull()
                    net(batch(group.rank() - servers, step)).backward()
                    worker.push()
    except torch.distributed.DistError as error:
        assert f"rank {lost} (process " in str(error), error
        print(error, flush=True)
        (folder / f"told{group.rank()}").touch()
        return
    raise AssertionError("nothing was raised")


def alone(group, servers: int, folder: Path) -> None:
    """The only worker is killed: the server has nobody left to serve, and says whom it has lost."""
    if group.rank() == 1:
        net = Net()
        worker = reef.AsyncWorker(net, group)
        worker.pull()
        os.kill(os.getpid(), signal.SIGKILL)
    server = reef.ParameterServer(group)
    for _ in range(2):  # it stays so
        try:
            server.serve(adam([server.parameter]))
        except torch.distributed.DistError as error:
            assert "ParameterServer::serve failed: rank 1 (process " in str(error), error
        else:
            raise AssertionError("nothing was raised")


def main() -> None:
    what, servers, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    group = reef.init_process_group(timeout_seconds=600.0, heartbeat_seconds=HEARTBEAT_SECONDS if "stopped" in what else 60.0)
    if what == "server_killed":
        server_lost(group, servers, folder, signal.SIGKILL)
    elif what == "server_stopped":
        server_lost(group, servers, folder, signal.SIGSTOP)
    else:
        {"synchronous": synchronous, "replays": replays, "killed": killed, "alone": alone, "stopped": stopped}[what](
            group, servers, folder
        )
    print("done", flush=True)


main()
