"""One rank of tests/python/test_shard_state.py: `save DIRECTORY` trains half of it at every stage and writes state dicts;
`load DIRECTORY RANKS` goes on from what so many ranks wrote, and compares with one process that did all of it."""

import sys
import warnings
from pathlib import Path

import torch
from shard_ranks import OPTIMIZERS, Net, accumulate, batch

import reef

STAGES = (0, 1, 2, 3)


class Counting(Net):
    """And what is in a state_dict besides parameters and buffers, and a buffer that is not."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.called = seed
        self.register_buffer("scratch", torch.full((3,), float(seed)), persistent=False)

    def get_extra_state(self) -> int:
        return self.called

    def set_extra_state(self, state: int) -> None:
        self.called = state


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, of: range) -> None:
    for step in of:
        optimizer.zero_grad()
        net(batch(rank, step)).backward()
        optimizer.step()


def steps_alone(net: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: int, of: range) -> None:
    for step in of:
        optimizer.zero_grad()
        accumulate(net, ranks, step)
        optimizer.step()


def save(group: torch.distributed.ProcessGroup, directory: Path) -> None:
    rank = group.rank()
    for name, make in OPTIMIZERS.items():
        alone = Counting(7)
        plain = make(alone.parameters())
        steps_alone(alone, plain, group.size(), range(2))
        for stage in STAGES:
            net = Counting(7)
            sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB")
            optimizer = make(sharded.parameters())
            steps(net, optimizer, rank, range(2))
            where = f"{name}, stage {stage}"

            whole = sharded.full_state_dict()
            expected = alone.state_dict()
            assert list(whole) == list(expected), (where, list(whole), list(expected))
            for key, value in expected.items():
                same = torch.equal(whole[key], value) if isinstance(value, torch.Tensor) else whole[key] == value
                assert same, f"{where}: {key}"

            whole_optimizer = sharded.full_optimizer_state_dict(optimizer)
            theirs = plain.state_dict()
            (group_of_ours,), (group_of_theirs,) = whole_optimizer["param_groups"], theirs["param_groups"]
            names = group_of_ours.pop("param_names")
            assert names == [key for key, _ in alone.named_parameters()], names
            assert group_of_ours == group_of_theirs, (where, group_of_ours, group_of_theirs)
            assert whole_optimizer["state"].keys() == theirs["state"].keys(), where
            for number, values in theirs["state"].items():
                ours = whole_optimizer["state"][number]
                assert ours.keys() == values.keys(), where
                for key, value in values.items():
                    assert ours[key].dtype == value.dtype and ours[key].shape == value.shape, (where, key)
                    assert torch.equal(ours[key], value), f"{where}: {names[number]} {key}"
            group_of_ours["param_names"] = names

            assert bool(sharded.full_state_dict(rank0_only=True)) == (rank == 0)
            assert bool(sharded.full_optimizer_state_dict(optimizer, rank0_only=True)) == (rank == 0)
            if rank == 0:
                torch.save((whole, whole_optimizer), directory / f"{name}.{stage}.pt")
            parts = sharded.sharded_state_dict(), sharded.sharded_optimizer_state_dict(optimizer)
            torch.save(parts, directory / f"{name}.{stage}.{rank}.pt")
        if rank == 0:
            torch.save((alone.state_dict(), plain.state_dict()), directory / f"{name}.plain.pt")


def load(group: torch.distributed.ProcessGroup, directory: Path, saved_by: int) -> None:
    rank, ranks = group.rank(), group.size()
    for name, make in OPTIMIZERS.items():
        expected = Counting(7)
        plain = make(expected.parameters())
        steps_alone(expected, plain, saved_by, range(2))
        steps_alone(expected, plain, ranks, range(2, 4))

        def check(net: torch.nn.Module, where: str, expected: torch.nn.Module = expected) -> None:
            assert net.called == 7 and net.scratch[0] == 8, where
            for (key, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(p.detach().clone(), q), f"{where}: {key}"

        for stage in STAGES:
            alone = Counting(8)
            optimizer = make(alone.parameters())
            module, state = torch.load(directory / f"{name}.{stage}.pt")
            alone.load_state_dict(module)
            optimizer.load_state_dict(state)  # takes the tensors themselves
            steps_alone(alone, optimizer, ranks, range(2, 4))
            check(alone, f"{name}: one process from stage {stage}")

            whole = torch.load(directory / f"{name}.{stage}.pt")
            parts = [torch.load(directory / f"{name}.{stage}.{of}.pt", mmap=True) for of in range(saved_by)]
            to = STAGES[(stage + saved_by) % len(STAGES)]
            for how, given in {
                "whole": [whole], "rank 0's": [whole] if rank == 0 else [], "parts": parts,
                "rank 0's parts": parts if rank == 0 else [], "plain": [torch.load(directory / f"{name}.plain.pt")],
            }.items():  # fmt: skip
                net = Counting(8)
                net.called = 7 if how.startswith("rank 0") and rank > 0 else 8  # what is no tensor is not sent
                sharded = reef.shard(net, group, stage=to, bucket_bytes="2KiB")
                optimizer = make(sharded.parameters())
                sharded.load_state_dict(*(module for module, _ in given))
                sharded.load_optimizer_state_dict(optimizer, *(state for _, state in given))
                steps(net, optimizer, rank, range(2, 4))
                check(net, f"{name}: {how} from stage {stage} to {to}")


def main() -> None:
    torch.ones(16).sqrt()  # MKL chooses its code at the first call
    warnings.simplefilter("error")
    group = reef.init_process_group()
    directory = Path(sys.argv[2])
    if sys.argv[1] == "save":
        save(group, directory)
    else:
        load(group, directory, int(sys.argv[3]))
    print("done")


if __name__ == "__main__":
    sys.exit(main())
