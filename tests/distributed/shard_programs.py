"""One rank of tests/python/test_shard_programs.py: runs random training programs under reef.shard and, in the same process,
what one process gets that accumulates over all ranks' batches. After every operation of a program its parts, gradients
and what it reads must have the same bits, or the operation was refused on every rank.

    shard_programs.py FIRST_SEED PROGRAMS [OPERATION,OPERATION,...]

The last argument keeps only these operations of the first program, by their numbers.
"""

import contextlib
import copy
import os
import random
import sys
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import checkpoint

import reef

TIMEOUT_SECONDS = 60
TYPED = (ValueError, RuntimeError)  # what reef's errors are, and c10::Error where memory is asked for


REFUSALS: dict[str, str] = {}
"""What was refused, by operation: the last of each."""


TRACES = bool(os.environ.get("REEF_TRACES"))


class Failed(RuntimeError):
    """What a program throws of its own."""


class Fails(torch.autograd.Function):
    """Throws in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Failed("this rank's backward fails")


class Half(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 40), torch.nn.Linear(40, 16, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = Half(), Half()
        self.side = torch.nn.Linear(16, 16)
        self.gain = torch.nn.Parameter(torch.ones(16))
        self.tied = self.first.up.weight

    def forward(self, x, way: str = "plain", fails: str = ""):
        call = {"reentrant": lambda half, x: checkpoint(half, x, use_reentrant=True),
                "checkpoint": lambda half, x: checkpoint(half, x, use_reentrant=False)}.get(way, lambda half, x: half(x))
        if fails == "late":
            x = Fails.apply(x)
        x = call(self.first, x)
        if way == "side":
            x = self.side(x)
        if fails == "early":
            x = Fails.apply(x)
        x = call(self.second, x) * self.gain
        return x @ self.tied.T if way != "short" else x


@dataclass
class Config:
    """What a program runs with."""

    stage: int
    dtype: torch.dtype | None
    offload: bool
    resident_bytes: int | None
    bucket_bytes: int
    reduction: str
    optimizer: str

    @property
    def has_parts(self) -> bool:
        return self.stage > 0 or self.dtype is not None or self.offload


@dataclass
class Operation:
    name: str
    arguments: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"


def make_program(seed: int, ranks: int) -> tuple[Config, list[Operation]]:
    draw = random.Random(seed)
    stage = draw.choice([0, 1, 2, 3])
    config = Config(stage=stage, dtype=draw.choice([None, None, torch.bfloat16]), offload=draw.random() < 0.25,
                    resident_bytes=draw.choice([0, 4000, 1 << 20]) if stage == 3 else None,
                    bucket_bytes=draw.choice([1, 3000, 1 << 20]), reduction=draw.choice(["mean", "sum"]),
                    optimizer=draw.choice(["momentum", "adamw", "reef"]))
    kinds = {"backward": 6, "no_sync": 2, "zero_grad": 3, "step": 5, "read": 2, "write": 2, "alias": 1, "save": 1, "load": 1,
             "raise": 1, "freeze": 1, "hold": 1, "clip": 1, "evaluate": 2, "forward": 1, "gather": 1}
    operations = []
    for _ in range(draw.randint(4, 14)):
        name = draw.choices(list(kinds), list(kinds.values()))[0]
        way = draw.choice(["plain", "plain", "short", "reentrant", "checkpoint"] + (["side"] if stage < 3 else []))
        more = draw.choice(["", "", "", "create_graph", "two_graphs"] + (["twice"] if way != "reentrant" else []))
        arguments = {
            "backward": {"way": way, "more": more},
            "no_sync": {"way": way, "more": ""},
            "zero_grad": {"of": draw.choice(["optimizer", "optimizer", "model"]), "set_to_none": draw.random() < 0.8},
            "read": {"by": draw.choice(["parameter", "data", "view", "alias", "deepcopy"])},
            "write": {"by": draw.choice(["parameter", "data", "alias"]), "parameter": draw.randrange(7)},
            "load": {"what": draw.choice(["module", "both"])},
            "raise": {"rank": draw.randrange(ranks), "where": draw.choice(["early", "late", "at once"]), "way": way,
                      "sync": draw.random() < 0.7},
            "freeze": {"parameter": draw.randrange(7)},
            "evaluate": {"mode": draw.choice(["no_grad", "inference"])},
        }.get(name, {})
        operations.append(Operation(name, arguments))
    return config, operations


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "reef": lambda p: reef.optim.AdamW(p, lr=1e-2),
}


def batch(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(1000 * number + rank)).to(dtype)


class Wrong(AssertionError):
    pass


class OneProcess:
    """The oracle: has the whole module, and accumulates over the batches of all ranks."""

    def __init__(self, config: Config, ranks: int, seed: int) -> None:
        self.config, self.ranks = config, ranks
        self.net = Net(seed)
        self.names = [name for name, _ in self.net.named_parameters()]
        self.whole = {name: p.detach().clone() for name, p in self.net.named_parameters()}  # masters, or what is stepped
        for p in self.whole.values():
            p.requires_grad_(True)
        if config.dtype is not None:
            self.net.to(config.dtype)
        self.optimizer = OPTIMIZERS[config.optimizer](list(self.whole.values()))
        self.sums = [{} for _ in range(ranks)]  # of each rank, in no_sync
        self.lost = False  # of passes in no_sync, by one that has failed
        self.show()

    def show(self) -> None:
        """The module's parameters become the masters, rounded."""
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(self.whole[name])

    def run_backward(self, rank: int, numbers: list[int], way: str) -> None:
        """Adds to the rank's sums what backward makes, each time it accumulates."""
        sums, wide = self.sums[rank], self.config.dtype is not None

        def add(name: str, p: torch.Tensor) -> None:
            gradient = p.grad.detach().float() if wide else p.grad.detach()
            sums[name] = sums[name] + gradient if name in sums else gradient.clone()
            p.grad = None

        hooks = [p.register_post_accumulate_grad_hook(lambda p, name=name: add(name, p))
                 for name, p in self.net.named_parameters() if p.requires_grad]
        dtype = self.config.dtype or torch.float32
        sum(self.net(batch(rank, n, dtype).requires_grad_(), way).pow(2).mean() for n in numbers).backward()
        for hook in hooks:
            hook.remove()

    def reduce(self) -> None:
        for name in self.names:
            given = [sums[name] for sums in self.sums if name in sums]
            if not given:
                continue
            total = None
            for sums in self.sums:
                one = sums.get(name, torch.zeros_like(given[0]))
                total = one if total is None else total + one
            if self.config.reduction == "mean":
                total = total / self.ranks
            whole = self.whole[name]
            whole.grad = total if whole.grad is None else whole.grad + total
        self.sums = [{} for _ in range(self.ranks)]


class Run:
    """A program under reef.shard, beside the oracle."""

    def __init__(self, group, config: Config, seed: int) -> None:
        self.group, self.config = group, config
        self.rank, self.ranks = group.rank(), group.size()
        self.one = OneProcess(config, self.ranks, seed)
        self.net = Net(seed if self.rank == 0 else seed + 1)
        options = {"stage": config.stage, "bucket_bytes": config.bucket_bytes, "reduction": config.reduction,
                   "offload": config.offload}
        if config.resident_bytes is not None:
            options["resident_bytes"] = config.resident_bytes
        if config.dtype is not None:
            options["mixed_precision"] = config.dtype
        self.sharded = reef.shard(self.net, group, **options)
        self.optimizer = OPTIMIZERS[config.optimizer](self.sharded.parameters())
        self.aliases, self.held, self.saved = [], [], []
        self.number = 0
        self.cleared = False

    # ---- what is compared
    def of_part(self, name: str, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        place = name.partition("[")[2]
        if not place:
            return whole
        first, last = place[:-1].split(":")
        return whole.detach().flatten()[int(first):int(last)].view(part.shape)

    def check(self) -> None:
        for name, part in zip(self.sharded.names(), self.sharded.parameters(), strict=True):
            if part.numel() == 0:
                continue
            whole = self.one.whole[name.partition("[")[0]]
            with torch.no_grad():
                self.same(f"part {name}", part, self.of_part(name, part, whole))
            expected = whole.grad
            if self.cleared and part.grad is not None and expected is None:
                continue  # the module's zero_grad() has cleared it, and neither backward nor a step has looked yet
            if self.sums_are_pending() and expected is None or not self.config.has_parts and self.sums_are_pending():
                continue  # a stand-in, or the rank's own
            if (expected is None) != (part.grad is None):
                raise Wrong(f"gradient of {name}: {part.grad is not None} here, {expected is not None} in one process")
            if expected is not None:
                self.same(f"gradient of {name}", part.grad, self.of_part(name, part, expected))
        for what, tensor, before in self.held:
            self.same(f"the gradient of {what} that is held", tensor, before)

    def same(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(found.detach(), expected.detach().to(found.dtype)):
            differ = (found.detach().double() - expected.detach().double()).abs().max().item()
            raise Wrong(f"{what} is off by {differ:.3g}")

    def sums_are_pending(self) -> bool:
        return self.one.lost or any(self.one.sums)

    # ---- operations
    def backward(self, way: str, more: str, sync: bool = True) -> None:
        self.number += 1
        dtype = self.config.dtype or torch.float32
        # two_graphs: two forward passes, and backward of the sum; twice: two passes of backward through one graph
        numbers = [self.number, self.number + 1000] if more == "two_graphs" else [self.number]
        passes = 2 if more == "twice" else 1
        with contextlib.nullcontext() if sync else self.sharded.no_sync():
            loss = sum(self.net(batch(self.rank, n, dtype).requires_grad_(), way).pow(2).mean() for n in numbers)
            for one in range(passes):
                if sync and self.one.lost:
                    try:
                        loss.backward()
                    except torch.distributed.DistError:
                        self.one.sums, self.one.lost = [{} for _ in range(self.ranks)], False
                        return
                    raise Wrong("lost sums were not told")
                loss.backward(retain_graph=one + 1 < passes or None, create_graph=more == "create_graph")
        for one in range(passes):
            for rank in range(self.ranks):
                self.one.run_backward(rank, numbers, way)
            if sync:
                self.one.reduce()

    def no_sync(self, way: str, more: str) -> None:
        self.backward(way, more, sync=False)

    def zero_grad(self, of: str, set_to_none: bool) -> None:
        set_to_none |= self.sums_are_pending()  # the others' stand-ins have no memory
        self.cleared |= of == "model"
        (self.optimizer if of == "optimizer" else self.net).zero_grad(set_to_none=set_to_none)
        self.one.sums = [{} for _ in range(self.ranks)]
        for p in self.one.whole.values():
            if p.grad is not None:
                p.grad = None if set_to_none else torch.zeros_like(p.grad)

    def step(self) -> None:
        if self.sums_are_pending():
            return
        self.optimizer.step()
        self.one.optimizer.step()
        self.one.show()

    def named(self) -> list:
        return list(self.net.named_parameters())

    def read(self, by: str) -> None:
        if by == "deepcopy":
            copied = copy.deepcopy(self.net)
            for (name, p), (_, expected) in zip(copied.named_parameters(), self.one.net.named_parameters(), strict=True):
                self.same(f"a copy of {name}", p, expected)
            return
        if by == "alias":
            for name, alias, _ in self.aliases:
                self.same(f"an alias of {name}", alias.clone(), dict(self.one.net.named_parameters())[name].flatten())
            return
        for (name, p), (_, expected) in zip(self.named(), self.one.net.named_parameters(), strict=True):
            with torch.no_grad():
                found = {"parameter": lambda p=p: p.clone(), "data": lambda p=p: p.data.clone(),
                         "view": lambda p=p: p.view(-1).clone()}[by]()
            self.same(f"{name} by {by}", found.view(expected.shape), expected)

    def alias(self) -> None:
        with torch.no_grad():
            self.aliases = [(name, p.detach().view(-1), p) for name, p in self.named()]

    def write(self, by: str, parameter: int) -> None:
        name, p = self.named()[parameter % len(self.named())]
        if by == "alias" and not self.aliases:
            by = "data"
        with torch.no_grad():
            if by == "alias":
                {n: alias for n, alias, _ in self.aliases}[name].mul_(0.5)
            else:
                (p if by == "parameter" else p.data).mul_(0.5)
            seen = dict(self.one.net.named_parameters())[name]
            before = seen.clone()
            seen.mul_(0.5)
            whole = self.one.whole[name].data
            whole.copy_(torch.where(before == seen, whole, seen.to(whole.dtype)))

    def save(self) -> None:
        module = self.sharded.full_state_dict()
        for name, expected in self.one.whole.items():
            self.same(f"{name} in the state dict", module[name], expected)
        optimizer = self.sharded.full_optimizer_state_dict(self.optimizer)
        states = [self.one.optimizer.state.get(p, {}) for p in self.one.whole.values()]
        for i, expected in enumerate(states):
            found = optimizer["state"].get(i, {})
            for key, value in expected.items():
                if torch.is_tensor(value) and value.numel() > 1:
                    self.same(f"state {key} of {self.one.names[i]}", found[key], value)
        whole = {name: p.detach().clone() for name, p in self.one.whole.items()}
        self.saved = [(module, optimizer, whole, copy.deepcopy(self.one.optimizer.state_dict()))]

    def load(self, what: str) -> None:
        if not self.saved:
            return
        module, optimizer, whole, of_one = self.saved[0]
        self.sharded.load_state_dict(module)
        with torch.no_grad():
            for name, p in self.one.whole.items():
                p.copy_(whole[name])
        self.one.show()
        if what == "both":
            self.sharded.load_optimizer_state_dict(self.optimizer, optimizer)
            self.one.optimizer.load_state_dict(copy.deepcopy(of_one))

    def raises(self, rank: int, where: str, way: str, sync: bool) -> None:
        """One rank fails. A pass leaves nothing behind then on any rank, and of passes in no_sync before it no sums; one in
        no_sync leaves nothing on that rank, and the next one that is reduced is abandoned by all."""
        self.number += 1
        dtype = self.config.dtype or torch.float32
        x = batch(self.rank, self.number, dtype).requires_grad_()
        fails = where if self.rank == rank else ""
        told = False
        try:
            with contextlib.nullcontext() if sync else self.sharded.no_sync():
                out = self.net(x, way, fails if fails != "at once" else "").pow(2).mean()
                if fails == "at once":
                    out = Fails.apply(out)
                out.backward()
        except (Failed, torch.distributed.DistError) as error:
            told = True
            if TRACES:
                print(f"{self.rank}: told {error}", flush=True)
        by_all = sync or (self.config.stage == 3 and self.ranks > 1)
        if told != (by_all or self.rank == rank):
            raise Wrong("was told" if told else "was not told")
        if by_all:
            self.one.sums = [{} for _ in range(self.ranks)]
            self.one.lost = False
            return
        self.one.lost = True
        for other in range(self.ranks):
            if other != rank:
                self.one.run_backward(other, [self.number], way)
        self.one.sums[rank] = {}

    def freeze(self, parameter: int) -> None:
        for net in (self.net, self.one.net):
            p = list(net.parameters())[parameter % len(self.named())]
            p.requires_grad_(not p.requires_grad)

    def hold(self) -> None:
        self.held = [(name, p.grad, p.grad.clone()) for name, p in zip(self.sharded.names(), self.sharded.parameters(), strict=True)
                     if p.grad is not None and p.numel() and not (self.cleared or self.sums_are_pending())]
        for p in self.sharded.parameters():
            p.grad = None
        for p in self.net.parameters():
            p.grad = None
        self.one.sums = [{} for _ in range(self.ranks)]
        for p in self.one.whole.values():
            p.grad = None

    def clip(self) -> None:
        if self.cleared or self.sums_are_pending():
            return
        norm = reef.clip_grad_norm_(self.sharded.parameters(), 0.05, self.group if self.config.stage > 0 else None)
        expected = reef.clip_grad_norm_(list(self.one.whole.values()), 0.05)
        self.same("the norm", torch.as_tensor(norm), torch.as_tensor(expected))

    def evaluate(self, mode: str) -> None:
        x = batch(99, self.number, self.config.dtype or torch.float32)
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            found, expected = self.net(x), self.one.net(x)
            self.same("what an evaluation gives", found.clone(), expected.clone())

    def forward(self) -> None:
        x = batch(98, self.number, self.config.dtype or torch.float32)
        self.same("what a forward pass gives", self.net(x), self.one.net(x))

    def gather(self) -> None:
        self.sharded.gather()

    def run(self, operations: list[tuple[int, Operation]]) -> None:
        for number, operation in operations:
            before = copy.deepcopy(self.one)
            if TRACES:
                print(f"{self.rank}: {number} {operation}", flush=True)
            refused = wrong = ""
            try:
                method = self.raises if operation.name == "raise" else getattr(self, operation.name)
                method(**operation.arguments)
                if operation.name in ("backward", "no_sync", "step"):
                    self.cleared = False
            except Wrong as error:
                wrong = str(error)
            except TYPED as error:
                refused = f"{type(error).__name__}: {error}"
                self.one = before  # the oracle forgets what was refused
            if not wrong:
                try:
                    self.check()
                except Wrong as error:
                    wrong = str(error)
            flags = torch.tensor([int(bool(refused)), int(not refused), int(bool(wrong))])
            self.group.allreduce([flags]).wait()
            where = f"operation {number}, {operation}: "
            if wrong:
                raise Wrong(where + wrong + (f" (refused: {refused})" if refused else ""))
            if flags[2]:
                raise Wrong(where + "another rank is wrong")
            if flags[0] and flags[1]:
                raise Wrong(where + (f"refused here alone: {refused}" if refused else "refused on another rank only"))
            if refused:
                REFUSALS[operation.name] = refused


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    only = {int(n) for n in sys.argv[3].split(",") if n} if len(sys.argv) > 3 else None
    torch.set_num_threads(1)
    group = reef.init_process_group(timeout_seconds=TIMEOUT_SECONDS)
    for seed in range(first, first + count):
        config, operations = make_program(seed, group.size())
        kept = [(i, o) for i, o in enumerate(operations) if only is None or i in only]
        if group.rank() == 0:
            print(f"program {seed}: {config}; " + ", ".join(f"{i} {o}" for i, o in kept), flush=True)
        run = Run(group, config, seed)
        run.run(kept)
        run.sharded.end()
    if group.rank() == 0:
        for name, said in REFUSALS.items():
            print(f"refused: {name}: {said}")
    print("done", flush=True)


if __name__ == "__main__":
    main()
