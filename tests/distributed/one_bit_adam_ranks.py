"""One rank of tests/python/test_one_bit_adam.py: `train STAGE` holds the loss of 1-bit Adam to Adam's; `save DIRECTORY` trains and
writes states of both phases; `load DIRECTORY` goes on from what another number of ranks wrote."""

import sys
from pathlib import Path

import torch

import reef

STEPS, WARM_UP = 200, 40
STAGES = (0, 1, 2, 3)


def net() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    """Of a function with noise, which no net of this size learns by heart."""
    torch.manual_seed(6)
    x = torch.randn(4096, 20)
    return x, (x[:, :5].sin().sum(1) + 0.5 * torch.randn(4096)).unsqueeze(1)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: torch.distributed.ProcessGroup, number: int) -> None:
    x, y = examples()
    batch = torch.randperm(4096, generator=torch.Generator().manual_seed(1000 * number + group.rank()))[:64]
    optimizer.zero_grad()
    loss_of(model, x[batch], y[batch]).backward()
    optimizer.step()


def trained(group: torch.distributed.ProcessGroup, stage: int, compression: reef.Compression, optimizer_class: type) -> float:
    model = net()
    sharded = reef.shard(model, group, stage=stage, compression=compression)
    optimizer = optimizer_class(sharded.parameters(), lr=3e-3)
    for number in range(STEPS):
        step(model, optimizer, group, number)
    sharded.gather()
    loss = loss_of(model, *examples()).item()
    sharded.end()
    return loss


def train(group: torch.distributed.ProcessGroup, stage: int) -> None:
    first = loss_of(net(), *examples()).item()
    adam = trained(group, stage, reef.Compression(), reef.optim.Adam)
    one_bit = trained(group, stage, reef.Compression("one_bit_adam", warmup_steps=WARM_UP), reef.optim.OneBitAdam)
    print(f"loss {first:.4f}, Adam {adam:.4f}, 1-bit Adam {one_bit:.4f}")
    assert adam < first / 4
    assert one_bit < 1.02 * adam, (one_bit, adam)


def total(state: dict, key: str) -> dict[str, torch.Tensor]:
    """What all ranks remember of whole parameters and of parts of them, by the elements of the whole."""
    of = {name: torch.zeros(p.numel()) for name, p in net().named_parameters()}
    for values in state["communication"]["of_ranks"].values():
        for name, of_name in values.items():
            parameter, _, part = name.partition("[")
            first = int(part.partition(":")[0] or 0)
            if key in of_name:
                of[parameter][first : first + of_name[key].numel()] += of_name[key].reshape(-1)
    return of


def check(found: dict, expected: dict, where: str) -> None:
    assert found["communication"]["numbers"] == expected["communication"]["numbers"], where
    for momentum in ("momentum", "momentum_of_slice"):
        theirs = total(expected, momentum)
        assert all(torch.equal(value, theirs[name]) for name, value in total(found, momentum).items()), f"{where}: {momentum}"
    ours, theirs = ({name: a + b for (name, a), b in zip(total(state, "residual").items(), total(state, "residual_of_sum").values(), strict=True)}
                    for state in (found, expected))
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-5) for name in ours), f"{where}: residuals"


def save(group: torch.distributed.ProcessGroup, directory: Path) -> None:
    for stage in STAGES:
        model = net()
        sharded = reef.shard(model, group, stage=stage, bucket_bytes="2KiB", compression=reef.Compression("one_bit_adam", warmup_steps=2))
        optimizer = reef.optim.OneBitAdam(sharded.parameters())
        for number in range(5):
            step(model, optimizer, group, number)
            state = sharded.full_state_dict(), sharded.full_optimizer_state_dict(optimizer)
            if group.rank() == 0:
                torch.save(state, directory / f"{stage}.{number}.pt")
        assert all(value.any() for value in total(state[1], "momentum").values())


def load(group: torch.distributed.ProcessGroup, directory: Path) -> None:
    for stage in STAGES:
        for number in range(5):
            module, state = torch.load(directory / f"{stage}.{number}.pt")
            for to in (stage, (stage + 1) % 4):
                where = f"stage {stage} to {to}, step {number}, rank {group.rank()}"
                model = net()
                sharded = reef.shard(model, group, stage=to, compression=reef.Compression("one_bit_adam", warmup_steps=2))
                optimizer = reef.optim.OneBitAdam(sharded.parameters())
                sharded.load_state_dict(module)
                sharded.load_optimizer_state_dict(optimizer, state)
                check(sharded.full_optimizer_state_dict(optimizer), state, where)
                for later in range(2):
                    step(model, optimizer, group, number + later)
                numbers = sharded.full_optimizer_state_dict(optimizer)["communication"]["numbers"]
                assert numbers == {"steps": number + 3, "momentum_steps": number + 1}, (where, numbers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = reef.init_process_group()
    if sys.argv[1] == "train":
        train(ranks, int(sys.argv[2]))
    else:
        {"save": save, "load": load}[sys.argv[1]](ranks, Path(sys.argv[2]))
    print("done")
