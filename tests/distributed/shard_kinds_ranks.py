"""One rank of tests/python/test_shard_state.py: a table of kinds of parameters by stages by masters. Each row trains as one
process that accumulates, in groups that are decided by the number of dimensions, and its states are that process's, whole, in
parts and loaded at another stage."""

import sys
import warnings
from pathlib import Path

import torch

import reef

STAGES = (0, 1, 2, 3)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, dtype=dtype))


class Kind(torch.nn.Module):
    """A matrix of more elements than a rank's slice begins at, and what a row adds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = parameter(24, 31)
        self.add()

    def add(self) -> None:
        pass

    def more(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(self.matrix.dtype) @ self.matrix
        return self.more(h).float().pow(2).mean()


class Alone(Kind):
    """Nothing more."""


class Complex(Kind):
    def add(self):
        self.wave = parameter(31, 40, dtype=torch.complex64)

    def more(self, h):
        return (h.to(torch.complex64) @ self.wave).abs()


class Empty(Kind):
    def add(self):
        self.none = parameter(0, 5)

    def more(self, h):
        return h + self.none.sum()


class Scalar(Kind):
    def add(self):
        self.scale = parameter()
        self.one = parameter(1)

    def more(self, h):
        return h * self.scale + self.one


class Vectors(Kind):
    def add(self):
        self.norm = torch.nn.LayerNorm(31)
        self.bias = parameter(700)

    def more(self, h):
        return self.norm(h) + self.bias[:31]


class Images(Kind):
    def add(self):
        self.conv = torch.nn.Conv2d(1, 9, 3).to(memory_format=torch.channels_last)

    def more(self, h):
        return self.conv(h[None, None]).mean((0, 2))


class Frozen(Kind):
    def add(self):
        self.still = torch.nn.Linear(31, 20).requires_grad_(False)

    def more(self, h):
        return self.still(h)


class FrozenTied(Kind):
    def add(self):
        self.still = torch.nn.Linear(31, 31).requires_grad_(False)
        self.same = torch.nn.Linear(31, 31).requires_grad_(False)
        self.same.weight = torch.nn.Parameter(self.still.weight.data, requires_grad=False)

    def more(self, h):
        assert self.same.weight.data_ptr() == self.still.weight.data_ptr()
        return self.same(self.still(h))


class TwoNames(Kind):
    def add(self):
        self.up, self.down = torch.nn.Linear(31, 31), torch.nn.Linear(31, 31)
        self.down.weight = self.up.weight

    def more(self, h):
        return self.down(self.up(h))


class BesideEachOther(Kind):
    """In one storage, as cuDNN's recurrent layers have them."""

    def add(self):
        both = torch.randn(31 * 40)
        self.first = torch.nn.Parameter(both[: 31 * 30].view(31, 30))
        self.second = torch.nn.Parameter(both[31 * 30 :].view(31, 10))

    def more(self, h):
        return torch.cat([h @ self.first, h @ self.second], 1)


class Small(Kind):
    """Of fewer elements than slices begin at: all ranks but one keep nothing."""

    def add(self):
        self.matrix = parameter(24, 2)
        self.bias = parameter(2)

    def more(self, h):
        return h + self.bias


KINDS = (Alone, Complex, Empty, Scalar, Vectors, Images, Frozen, FrozenTied, TwoNames, BesideEachOther, Small)
OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}
MASTERS = {"none": {}, "16 bits": {"mixed_precision": torch.bfloat16}, "offload": {"offload": True}}
"""And "copies": none, where half of the ranks have a copy."""


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(7, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def by_dimensions(parameters: list[torch.Tensor]) -> list[dict]:
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def rule(_: str, shape: torch.Size) -> dict:
    return {"weight_decay": 0.5 if len(shape) > 1 else 0.0}


class OneProcess:
    """With masters of float32 of what is computed with in 16 bits."""

    def __init__(self, kind, make, masters) -> None:
        self.net, self.kept = kind(), kind()
        if "mixed_precision" in masters:
            for p in self.net.parameters():
                if p.dtype == torch.float32:
                    p.data = p.data.bfloat16()
        if kind is FrozenTied:
            self.net.same.weight.data = self.net.still.weight.data
        self.masters = [(q, p) for q, p in zip(self.kept.parameters(), self.net.parameters(), strict=True) if q.requires_grad]
        self.optimizer = make(by_dimensions([q for q, _ in self.masters]))

    def step(self, ranks: int, step: int) -> None:
        sums = [torch.zeros_like(q) for q, _ in self.masters]
        for rank in range(ranks):
            self.net.zero_grad()
            self.net(batch(rank, step)).backward()
            for total, (_, p) in zip(sums, self.masters, strict=True):
                total.add_(p.grad)
        with torch.no_grad():
            for total, (q, _) in zip(sums, self.masters, strict=True):
                q.grad = total.div_(ranks)
            self.optimizer.step()
            for q, p in self.masters:
                p.copy_(q)


def same(found: object, expected: object) -> bool:
    if not isinstance(expected, torch.Tensor):
        return found == expected
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def check_states(sharded, optimizer, alone: OneProcess, where: str) -> tuple[dict, dict]:
    whole, expected = sharded.full_state_dict(), alone.kept.state_dict()
    assert list(whole) == list(expected), (where, list(whole))
    for key, value in expected.items():
        assert same(whole[key], value), f"{where}: {key} is {whole[key].dtype} {tuple(whole[key].shape)}"
    state, theirs = sharded.full_optimizer_state_dict(optimizer), alone.optimizer.state_dict()
    for ours, group in zip(state["param_groups"], theirs["param_groups"], strict=True):
        assert {k: v for k, v in ours.items() if k != "param_names"} == group, (where, ours, group)
    assert state["state"].keys() == theirs["state"].keys(), (where, state["state"].keys())
    for number, values in theirs["state"].items():
        assert state["state"][number].keys() == values.keys(), where
        for key, value in values.items():
            assert same(state["state"][number][key], value), f"{where}: {number} {key}"
    return whole, state


def of_all_ranks(group, directory: Path, own: object) -> list:
    torch.save(own, directory / f"{group.rank()}.pt")
    reef.barrier(group)
    found = [torch.load(directory / f"{rank}.pt") for rank in range(group.size())]
    reef.barrier(group)
    return found


def train(net, optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    net(batch(rank, step)).backward()
    optimizer.step()


def check_row(group, directory: Path, kind, masters: str, name: str) -> None:
    rank, ranks, make = group.rank(), group.size(), OPTIMIZERS[name]
    alone = OneProcess(kind, make, MASTERS.get(masters, {}))
    for step in range(2):
        alone.step(ranks, step)
    last = OneProcess(kind, make, MASTERS.get(masters, {}))
    for step in range(3):
        last.step(ranks, step)
    for stage in STAGES:
        where = f"{kind.__name__}, {name}, masters {masters}, stage {stage}"
        how = dict(bucket_bytes="4KiB", **MASTERS.get(masters, {}))
        degree = lambda at: ranks // 2 if masters == "copies" and at > 0 else 0  # noqa: E731
        net = kind()
        sharded = reef.shard(net, group, stage=stage, shard_degree=degree(stage), **how)
        parts = sharded.parameters()
        shapes = [p.shape for p in kind().parameters() if p.requires_grad]
        assert [reef.whole_shape_of(p) for p in parts] == shapes and len(sharded.names()) == len(shapes), where
        assert [p.ndim > 1 for p in parts] == [len(shape) > 1 for shape in shapes], where
        groups = sharded.param_groups(rule)
        mine = [group for group in by_dimensions(parts) if group["params"]]
        by_weight = {group["weight_decay"]: list(map(id, group["params"])) for group in groups}
        assert by_weight == {group["weight_decay"]: list(map(id, group["params"])) for group in mine}, where
        optimizer = make(by_dimensions(parts))
        for step in range(2):
            train(net, optimizer, rank, step)
        assert all(p.grad is not None for p in parts), where  # alike on all ranks
        whole, state = check_states(sharded, optimizer, alone, where)

        to = STAGES[(stage + 1) % len(STAGES)]
        own = sharded.sharded_state_dict(), sharded.sharded_optimizer_state_dict(optimizer)
        assert all(v.numel() > 0 or "none" in k for k, v in own[0].items()), where
        given = of_all_ranks(group, directory, own)
        ways = {"whole": ([whole], [state]), "parts": ([model for model, _ in given], [kept for _, kept in given])}
        for given_as in ["whole", "parts"] if kind is Alone else ["whole"] if (KINDS.index(kind) + stage) % 2 else ["parts"]:
            of_model, of_optimizer = ways[given_as]
            other = kind()
            torch.nn.init.ones_(other.matrix)
            resumed = reef.shard(other, group, stage=to, shard_degree=degree(to), **how)
            second = make(by_dimensions(resumed.parameters()))
            resumed.load_state_dict(*of_model)
            resumed.load_optimizer_state_dict(second, *of_optimizer)
            check_states(resumed, second, alone, f"{where}, {given_as} loaded at {to}")
            train(other, second, rank, 2)
            check_states(resumed, second, last, f"{where}, {given_as} goes on at {to}")
            resumed.end()
        sharded.end()


def main() -> None:
    torch.ones(16).sqrt()  # MKL chooses its code at the first call
    warnings.simplefilter("error")
    group = reef.init_process_group()
    for kind in KINDS:
        for masters in [*MASTERS, *(["copies"] if group.size() % 2 == 0 else [])]:
            for name in OPTIMIZERS:
                if masters == "none" or name == "AdamW":
                    check_row(group, Path(sys.argv[1]), kind, masters, name)
    print("done")


if __name__ == "__main__":
    sys.exit(main())
