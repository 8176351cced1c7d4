"""One rank of tests/python/test_shard_compression.py: `save METHOD DIRECTORY` trains at every stage and writes state dicts;
`load METHOD DIRECTORY RANKS` goes on from what so many ranks wrote; `killed METHOD VICTIM SECONDS` exchanges until that rank is killed
so long after it has begun, at whatever it does then; `entropy_coded qsgd` trains with levels in an entropy code and without. Gradients are whole numbers and added up, and the learning
rate is 1: minus the parameters are what has been applied, and with what is held back that is what there was: bit for bit, if
what is held back are whole numbers, too."""

import os
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import compressions
from whole_number_net import SHAPES, Net, gradients

import reef

STAGES = (0, 1, 2, 3)
METHOD = sys.argv[2]
# Without a momentum what is applied is what there was; what is left of one is remembered all the same.
COMPRESSION = reef.Compression("dgc", density=0.1, momentum=0) if METHOD == "dgc" else METHOD
WHOLE_NUMBERS = METHOD in {"bfloat16", "float16", "dgc", "oktopk"}


def train(net: Net, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        own = gradients(rank, step)
        torch.stack([(p * own[name]).sum() for name, p in net.named_parameters()]).sum().backward()
        optimizer.step()


def all_gradients(ranks: int, steps: range) -> dict[str, torch.Tensor]:
    of_all = [gradients(rank, step) for rank in range(ranks) for step in steps]
    return {name: torch.stack([one[name] for one in of_all]).sum(0) for name in SHAPES}


def held_back(state: dict, what: str = "residual") -> dict[str, torch.Tensor]:
    """The sum over ranks, of whole parameters and parts of them."""
    total = {name: torch.zeros(shape).reshape(-1) for name, shape in SHAPES.items()}
    for of_rank in state.get("communication", {}).get("of_ranks", {}).values():
        for name, values in of_rank.items():
            parameter, _, part = name.partition("[")
            if parameter not in SHAPES:
                assert not any(value.any() for key, value in values.items() if key.startswith(what)), name
                continue
            first = int(part.partition(":")[0] or 0)
            for key, value in values.items():
                if not key.startswith(what):
                    continue
                total[parameter][first : first + value.numel()] += value.reshape(-1)
    return {name: value.view(SHAPES[name]) for name, value in total.items()}


def check(sharded: reef.Shard, optimizer: torch.optim.Optimizer, expected: dict[str, torch.Tensor], where: str) -> None:
    module, state = sharded.full_state_dict(), sharded.full_optimizer_state_dict(optimizer)
    rest = held_back(state)
    for name, value in expected.items():
        assert same(rest[name] - module[name], value), f"{where}: {name}"


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found, expected) if WHOLE_NUMBERS else torch.allclose(found, expected, rtol=0, atol=0.5)


def made(group: torch.distributed.ProcessGroup, stage: int, bucket_bytes: str):
    net = Net()
    sharded = reef.shard(net, group, stage=stage, bucket_bytes=bucket_bytes, reduction="sum", compression=COMPRESSION)
    return net, sharded, torch.optim.SGD(sharded.parameters(), lr=1.0)


def save(group: torch.distributed.ProcessGroup, directory: Path) -> None:
    rank, ranks = group.rank(), group.size()
    for stage in STAGES:
        net, sharded, optimizer = made(group, stage, "4KiB")
        train(net, optimizer, rank, range(2))
        check(sharded, optimizer, all_gradients(ranks, range(2)), f"stage {stage}")
        whole = sharded.full_state_dict(), sharded.full_optimizer_state_dict(optimizer)
        assert ranks == 1 or any(value.abs().sum() > 0 for value in held_back(whole[1]).values())
        assert METHOD != "dgc" or any(value.abs().sum() > 0 for value in held_back(whole[1], "momentum_of_rank").values())
        if rank == 0:
            torch.save(whole, directory / f"{stage}.pt")
        parts = sharded.sharded_state_dict(), sharded.sharded_optimizer_state_dict(optimizer)
        torch.save(parts, directory / f"{stage}.{rank}.pt")
        plain = torch.optim.SGD(Net().parameters(), lr=1.0)
        plain.load_state_dict(whole[1])  # torch's own does not look at it


def load(group: torch.distributed.ProcessGroup, directory: Path, saved_by: int) -> None:
    rank, ranks = group.rank(), group.size()
    before = all_gradients(saved_by, range(2))
    after = {name: value + before[name] for name, value in all_gradients(ranks, range(2, 4)).items()}
    for stage in STAGES:
        whole = torch.load(directory / f"{stage}.pt")
        parts = [torch.load(directory / f"{stage}.{of}.pt", mmap=True) for of in range(saved_by)]
        for to in (stage, (stage + 1) % len(STAGES)):
            for how, given in {"whole": [whole], "rank 0's": [whole] if rank == 0 else [], "parts": parts}.items():
                net, sharded, optimizer = made(group, to, "1KiB")
                where = f"{how} from stage {stage} to {to}, rank {rank}"
                sharded.load_state_dict(*(module for module, _ in given))
                sharded.load_optimizer_state_dict(optimizer, *(state for _, state in given))
                check(sharded, optimizer, before, where)
                momenta = held_back(sharded.full_optimizer_state_dict(optimizer), "momentum_of_rank")
                assert all(same(momenta[n], was) for n, was in held_back(whole[1], "momentum_of_rank").items()), where
                train(net, optimizer, rank, range(2, 4))
                check(sharded, optimizer, after, where + ", two steps later")
        if saved_by > 1:
            try:
                sharded.load_optimizer_state_dict(optimizer, *(state for _, state in parts[1:]))
                raise AssertionError("a state that is missing was not missed")
            except ValueError as error:
                assert "rank 0" in str(error) or "none of the pieces" in str(error), error
            check(sharded, optimizer, after, f"stage {stage}, after a refusal")

        net, sharded, optimizer = made(group, stage, "4KiB")
        sharded.load_state_dict(whole[0])
        sharded.load_optimizer_state_dict(optimizer, whole[1])
        net.extra = torch.nn.Linear(2, 2)
        sharded.refresh(optimizer)
        module, state = sharded.full_state_dict(), sharded.full_optimizer_state_dict(optimizer)
        assert all(same(held_back(state)[n] - module[n], before[n]) for n in SHAPES), f"stage {stage}, after refresh()"


def killed(group: torch.distributed.ProcessGroup, victim: int, seconds: float) -> None:
    """Steps are hardly more than the exchange of gradients, in several buckets."""
    net = torch.nn.Module()
    net.all = torch.nn.ParameterList(torch.zeros(256, 300) for _ in range(8))
    sharded = reef.shard(net, group, compression=compressions.small(METHOD), bucket_bytes="512KiB")
    given = [torch.randn(256, 300) for _ in net.all]
    if METHOD == "one_bit_adam":
        reef.optim.OneBitAdam(sharded.parameters())  # who alone is given momentum

    def step() -> None:
        for p in net.all:
            p.grad = None
        torch.autograd.backward(list(net.all), given)

    step()
    reef.barrier(group)
    if group.rank() == victim:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            step()
    except dist.DistBackendError as error:
        assert f"rank {victim} (process " in str(error) and " in step " in str(error), error
    sharded.sharded_state_dict()  # as it was


def entropy_coded(group: torch.distributed.ProcessGroup) -> None:
    """An entropy code changes nothing but bytes: at every stage, among copies, with passes in no_sync, in outer steps, and from
    each other's states."""
    ranks = group.size()
    rows = [(stage, degree, local) for stage in STAGES for degree in (0, 2) for local in (False, True)]
    for stage, degree, local in rows:
        if (degree and (stage == 0 or ranks % degree)) or (local and (stage > 0 or degree)):
            continue  # what there is not
        runs = []
        for coded in (False, True):
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Linear(96, 500), torch.nn.Tanh(), torch.nn.Linear(500, 96))
            compression = reef.Compression("qsgd", bits=3, seed=5, entropy_coded=coded)
            of_shard = {} if local else {"compression": compression}
            sharded = reef.shard(net, group, stage=stage, bucket_bytes="96KiB", shard_degree=degree, **of_shard)
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
            updates = reef.LocalUpdates(sharded, local_steps=2, compression=compression) if local else None
            runs.append((net, sharded, optimizer, updates))
        where = f"stage {stage} among {degree or ranks}{', in outer steps' if local else ''}"
        for number in range(6):
            for net, sharded, optimizer, updates in runs:
                optimizer.zero_grad()
                for micro in range(1 if local else 2):
                    generator = torch.Generator().manual_seed(1000 * number + 10 * micro + group.rank())
                    with sharded.no_sync() if micro == 0 and not local else nullcontext():
                        net(torch.randn(16, 96, generator=generator)).square().mean().backward()
                optimizer.step()
                if updates is not None:
                    updates.step()
            plain, coded = (sharded.full_state_dict() for _, sharded, _, _ in runs)
            assert all(torch.equal(plain[name], coded[name]) for name in plain), f"{where}, step {number}"
            if number == 3 and not local:  # each goes on from the other's
                states = [sharded.full_optimizer_state_dict(optimizer) for _, sharded, optimizer, _ in runs]
                assert states[0]["communication"] == states[1]["communication"], where
                for (_, sharded, optimizer, _), state in zip(runs, reversed(states), strict=True):
                    sharded.load_optimizer_state_dict(optimizer, state)
        sent = [(updates or sharded).sent_bytes for _, sharded, _, updates in runs]
        assert sent[1] < sent[0] if ranks > 1 else sent[1] == sent[0], f"{where}: {sent}"
        for _, sharded, _, updates in runs:
            if updates is not None:
                updates.close()
            sharded.end()


def main() -> None:
    group = reef.init_process_group()
    if sys.argv[1] == "entropy_coded":
        entropy_coded(group)
        print("done")
        return
    if sys.argv[1] == "killed":
        killed(group, int(sys.argv[3]), float(sys.argv[4]))
        print("done")
        return
    directory = Path(sys.argv[3])
    if sys.argv[1] == "save":
        save(group, directory)
    else:
        load(group, directory, int(sys.argv[4]))
    print("done")


if __name__ == "__main__":
    sys.exit(main())
