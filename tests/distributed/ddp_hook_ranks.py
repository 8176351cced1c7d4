"""One rank of tests/python/test_ddp_hook.py: `ddp_hook_ranks.py SCENE [ARGUMENT...]`. What DistributedDataParallel makes of a
module with reef.ddp_hook is held against reef.shard, which has the same exchange and none of torch's wrapper."""

import copy
import itertools
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import compressions

import reef

BUCKET_BYTES = "12KiB"
TORCH_BUCKET_MIB = 0.004
"""Buckets of torch's and the hook's own have different borders, several of each."""


class Net(torch.nn.Module):
    """Layers that are used in another order than they are defined, so torch lays its buckets out anew after a step or two;
    one of them in another dtype."""

    def __init__(self, rank: int, precise: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.last, self.first = torch.nn.Linear(40, 24), torch.nn.Linear(24, 40)
        self.precise = torch.nn.Linear(40, 7, dtype=precise)
        self.norm, self.middle = torch.nn.LayerNorm(40), torch.nn.Linear(40, 40, bias=False)
        self.still = torch.nn.Parameter(torch.ones(40), requires_grad=False)

    def forward(self, x: torch.Tensor, layers: str = "nmd") -> torch.Tensor:
        x = self.first(x) * self.still
        x = self.norm(x) if "n" in layers else x
        x = torch.tanh(self.middle(x)) if "m" in layers else x
        more = self.precise(x.to(self.precise.weight.dtype)).mean() if "d" in layers else 0
        return self.last(x).pow(2).mean() + more


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 24, generator=torch.Generator().manual_seed(1000 * rank + number))


def alike(group, net: torch.nn.Module, where: str) -> None:
    for name, p in net.named_parameters():
        first = p.detach().clone()
        reef.broadcast([first], group)
        assert torch.equal(first, p), f"{where}: {name} is another on rank {group.rank()}"


def equal(found: torch.nn.Module, expected: torch.nn.Module, where: str) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), f"{where}: {name} is off by {(a - b).abs().max()}"


class Run:
    """A module that trains by the hook, or by reef.shard."""

    def __init__(self, group, compression: reef.Compression, *, by_hook: bool, **of_torch) -> None:
        self.net = Net(group.rank(), torch.float32) if compression.method == "dgc" else Net(group.rank())
        self.rank = group.rank()
        if by_hook:
            self.model = DistributedDataParallel(self.net, process_group=group, bucket_cap_mb=TORCH_BUCKET_MIB, **of_torch)
            self.hook = reef.ddp_hook(self.model, compression=compression, bucket_bytes=BUCKET_BYTES)
            self.no_sync = self.model.no_sync
        else:
            self.model = self.net
            self.shard = reef.shard(self.net, group, compression=compression, bucket_bytes=BUCKET_BYTES)
            self.no_sync = self.shard.no_sync
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9)

    def step(self, number: int, *, passes: int = 1, layers: str = "nmd") -> None:
        """So many passes, of which the last is reduced."""
        self.optimizer.zero_grad()
        for micro in range(passes):
            with self.no_sync() if micro + 1 < passes else nullcontext():
                self.model(batch(self.rank, 10 * number + micro), layers).backward()
        self.optimizer.step()


def equals(group) -> None:
    """Every method, with what torch's wrapper can do about buckets and passes."""
    for name, view, passes in itertools.product(compressions.of_gradients(), (False, True), (1, 2)):
        compression = compressions.small(name)
        where = f"{name}, gradient_as_bucket_view {view}, {passes} passes"
        hooked = Run(group, compression, by_hook=True, gradient_as_bucket_view=view)
        sharded = Run(group, compression, by_hook=False)
        for number in range(4):
            hooked.step(number, passes=passes)
            sharded.step(number, passes=passes)
            equal(hooked.net, sharded.net, f"{where}, step {number}")
            alike(group, hooked.net, f"{where}, step {number}")
        assert hooked.hook.sent_bytes > 0 or group.size() == 1
        sharded.shard.end()
        hooked.hook.close()


def layers_of(step: int, rank: int) -> str:
    """Layers that all, some or no ranks use."""
    return ("nmd", "nd" if rank == 0 else "md", "n", "d", "", "nmd")[step]


def unused(group) -> None:
    """Of what no rank has used in a pass there is no gradient, and what is held back stays; so it does where torch knows from
    the first pass what is used."""
    for name in compressions.of_gradients():
        for view in (False, True):
            ways = {
                "found": (dict(find_unused_parameters=True), layers_of),
                "static": (dict(static_graph=True), lambda step, rank: "n"),
            }
            for way, (of_torch, layers) in ways.items():
                hooked = Run(group, compressions.small(name), by_hook=True, gradient_as_bucket_view=view, **of_torch)
                sharded = Run(group, compressions.small(name), by_hook=False)
                for number in range(6):
                    for run in (hooked, sharded):
                        run.step(number, layers=layers(number, group.rank()))
                    equal(hooked.net, sharded.net, f"{name}, {way}, view {view}, step {number}")
                held_back = hooked.hook.state_dict()
                assert same(held_back, saved(sharded)), f"{name}, {way}, view {view}"
                sharded.shard.end()
                hooked.hook.close()


def saved(sharded: Run) -> dict:
    return sharded.shard.full_optimizer_state_dict(sharded.optimizer).get("communication", {})


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Weights(torch.nn.Module):
    """Whose gradients are whole numbers."""

    SHAPES = {"matrix": (40, 13), "vector": (700,), "sometimes": (300,)}

    def __init__(self) -> None:
        super().__init__()
        for name, shape in self.SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.get_parameter(name) * own).sum() for name, own in gradients.items()]).sum()


def conserves(group) -> None:
    """What is applied and what is held back are together all gradients, whatever torch does with the memory of gradients that
    were cleared in place."""
    for name, view, to_none in itertools.product(("topk", "gtopk"), (False, True), (False, True)):
        net = Weights()
        model = DistributedDataParallel(
            net, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=0.001
        )
        hook = reef.ddp_hook(model, compression=reef.Compression(name, density=0.05), bucket_bytes="2KiB")
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        total = {n: torch.zeros(shape) for n, shape in Weights.SHAPES.items()}
        for step in range(6):
            names = [n for n in Weights.SHAPES if n != "sometimes" or step in (1, 4)]
            of_all = [
                {n: torch.randint(-800, 800, Weights.SHAPES[n], generator=torch.Generator().manual_seed(10 * step + rank)).float()
                 for n in names}
                for rank in range(group.size())
            ]  # fmt: skip
            for n in names:
                total[n] += sum(each[n] for each in of_all)
            optimizer.zero_grad(set_to_none=to_none)
            model(of_all[group.rank()]).backward()
            optimizer.step()
            held = {n: torch.zeros(shape) for n, shape in Weights.SHAPES.items()}
            for of_rank in hook.state_dict()["of_ranks"].values():
                for n, values in of_rank.items():
                    held[n] += values["residual"]
            for n, p in net.named_parameters():
                assert torch.equal(held[n] - group.size() * p.detach(), total[n]), (name, view, to_none, step, n)
        hook.close()


def resumes(group, folder: Path) -> None:
    """A run that is saved and goes on in a new wrapper, whose first buckets are others, is bit for bit one that was not; and
    a state goes from one face to the other."""
    rank, ranks = group.rank(), group.size()
    for name in compressions.of_gradients():
        compression = compressions.small(name)
        whole = Run(group, compression, by_hook=True)
        for number in range(3):
            whole.step(number)
        before = [whole.net.state_dict(), whole.optimizer.state_dict(), whole.hook.state_dict()]
        torch.save(before, folder / f"whole.{rank}.pt")
        torch.save(whole.hook.sharded_state_dict(), folder / f"part.{rank}.pt")
        for number in range(3, 6):
            whole.step(number)
        reef.barrier(group)
        parts = [torch.load(folder / f"part.{of}.pt") for of in range(ranks)]
        of_net, of_optimizer, of_hook = torch.load(folder / f"whole.{rank}.pt")
        for how, given in {"whole": [of_hook], "rank 0's": [of_hook] if rank == 0 else [], "parts": parts}.items():
            for by_hook in (True, False):
                resumed = Run(group, compression, by_hook=by_hook)
                resumed.net.load_state_dict(of_net)
                if by_hook:
                    resumed.optimizer.load_state_dict(copy.deepcopy(of_optimizer))
                    resumed.hook.load_state_dict(*given)
                else:
                    states = [{**copy.deepcopy(of_optimizer), "communication": each} for each in given]
                    resumed.shard.load_optimizer_state_dict(resumed.optimizer, *states)
                for number in range(3, 6):
                    resumed.step(number)
                equal(resumed.net, whole.net, f"{name}, {how}, by hook: {by_hook}")
                resumed.hook.close() if by_hook else resumed.shard.end()
        if ranks > 1 and of_hook:
            refused(lambda: whole.hook.load_state_dict(*parts[1:]), "rank 0")  # noqa: B023
            whole.step(6)
        whole.hook.close()


def refused(call: Callable, text: str, kind: type[Exception] = ValueError) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"was not refused: {text}")


def refuses(group) -> None:
    rank = group.rank()
    wrap = lambda net, **how: DistributedDataParallel(net, process_group=group, **how)  # noqa: E731
    refused(lambda: reef.ddp_hook(Net(0)), "a Net: give it a torch.nn.parallel.DistributedDataParallel")
    model = wrap(Net(0))
    refused(lambda: reef.ddp_hook(model, compression="top-k"), "is none of")
    refused(lambda: reef.ddp_hook(model, allow=["exact"]), "allow, and compression none")
    refused(lambda: reef.ddp_hook(model, bucket_bytes=0), "bucket_bytes 0")
    refused(lambda: reef.ddp_hook(model, compression=compressions.small("one_bit_adam")), "gives a momentum to an optimizer")
    refused(lambda: reef.ddp_hook(model, compression="dgc"), "precise.weight, which has gradients of Double")
    refused(lambda: reef.ddp_hook(wrap(torch.nn.Embedding(5, 4, sparse=True))), "sparse gradients")
    refused(lambda: reef.ddp_hook(wrap(torch.nn.Linear(3, 3).half()), compression="bfloat16"), "is of Half, and a compression")
    if group.size() > 1:
        backwards = reef.subgroup(group, [*range(group.size())][::-1])
        refused(lambda: reef.ddp_hook(model, backwards), "other ranks than the model's")
        refused(lambda: reef.ddp_hook(model, compression="topk" if rank == 0 else "gtopk"), "different models or options")
        refused(lambda: reef.ddp_hook(model, bucket_bytes=1 << (14 + rank)), "different models or options")
    hook = reef.ddp_hook(model, compression="bfloat16")
    refused(lambda: reef.ddp_hook(model), "that has a communication hook")
    refused(lambda: reef.shard(model.module, group), "another Shard has already, or a DdpHook")
    refused(lambda: reef.ddp_hook(wrap(model.module)), "another Shard has already, or a DdpHook")
    state = hook.state_dict()
    for wrong in ({**state, "method": "topk"}, {**state, "ranks": 77}, {"method": 3}):
        refused(lambda wrong=wrong: hook.load_state_dict(wrong), "")
    held_back = {0: {"nobody.weight": {"residual": torch.ones(3)}}}
    refused(lambda: hook.load_state_dict({"method": "bfloat16", "ranks": 1, "numbers": {}, "of_ranks": held_back}), "nobody.weight")
    model(batch(rank, 0)).backward()  # as ever

    hook = reef.ddp_hook(frozen := wrap(torch.nn.Linear(24, 5)))
    frozen.module.weight.grad = None
    refused(lambda: hook._native.exchange(torch.zeros(5), [frozen.module.bias], True), "gradients of 1 of 2 parameters")
    refused(lambda: hook._native.exchange(torch.zeros(5), [frozen.module.bias], True), "gradients of 1 of 2 parameters")
    hook.close()
    refused(hook.state_dict, "has been closed")
    refused(lambda: frozen(batch(rank, 0)).sum().backward(), "has been closed")
    reef.shard(frozen.module, group)


def told(group, begin: Callable[[Run], None], text: str) -> None:
    """`begin` ends this rank's part in step 2, and all others are told within the step."""
    run = Run(group, reef.Compression("topk", density=0.1), by_hook=True)
    last = group.size() - 1
    for number in range(2):
        run.step(number)
    if group.rank() == last:
        return begin(run)
    before = [p.detach().clone() for p in run.net.parameters()]
    refused(lambda: run.step(2), text, dist.DistError)
    assert all(torch.equal(a, b) for a, b in zip(before, run.net.parameters(), strict=True))
    run.hook.sharded_state_dict()  # of the step before
    refused(lambda: run.hook._native.exchange(torch.zeros(1), [], False), text, dist.DistError)
    # Who ends now is gone, which others would be told in place of what they wait for here.
    store = group_store()
    store.set(f"told {group.rank()}", "")
    store.wait([f"told {rank}" for rank in range(last)])
    return None


def fails(group) -> None:
    """Within the hook, on the last rank."""

    def begin(run: Run) -> None:
        native = run.hook._native

        class Cut:
            end_pass = native.end_pass

            def exchange(self, buffer, parameters, is_last):
                return native.exchange(buffer, parameters[1:], is_last)

        run.hook._native = Cut()
        refused(lambda: run.step(2), "other elements than its parameters")
        refused(lambda: reef.barrier(group), "", dist.DistError)
        group_store().wait([f"told {rank}" for rank in range(group.rank())])

    told(group, begin, "the end of the backward pass of step 3 of DDP hook 1 on rank")


def leaves(group) -> None:
    """A program's own error ends backward on the last rank, which goes on to something else."""

    def begin(run: Run) -> None:
        run.net.norm.weight.register_hook(lambda _: 1 // 0)
        refused(lambda: run.step(2), "", ZeroDivisionError)
        refused(lambda: reef.barrier(group), "", dist.DistError)
        group_store().wait([f"told {rank}" for rank in range(group.rank())])

    told(group, begin, "reef::barrier")


def killed(group) -> None:
    told(group, lambda _: os.kill(os.getpid(), signal.SIGKILL), f"rank {group.size() - 1} (process ")


def own_group(group) -> None:
    """The wrapper's group is torch's own, and the exchange goes by that or by one of Reef's."""
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", group_store()), rank=group.rank(), world_size=group.size())
    for given in (None, group):
        net = Net(group.rank())
        model = DistributedDataParallel(net, bucket_cap_mb=TORCH_BUCKET_MIB, find_unused_parameters=True)
        hook = reef.ddp_hook(model, given, compression=reef.Compression("gtopk", density=0.1), bucket_bytes=BUCKET_BYTES)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        sharded = Run(group, reef.Compression("gtopk", density=0.1), by_hook=False)
        for number in range(3):
            optimizer.zero_grad()
            model(batch(group.rank(), 10 * number)).backward()
            optimizer.step()
            sharded.step(number)
            equal(net, sharded.net, f"group {given}, step {number}")
        with model.join():
            refused(lambda: model(batch(group.rank(), 1)).backward(), "join()")  # noqa: B023
        hook.close()
        sharded.shard.end()
    dist.destroy_process_group()


def group_store() -> dist.Store:
    return dist.FileStore(sys.argv[2] + "/store", int(os.environ["WORLD_SIZE"]))


def chooses(group) -> None:
    net = torch.nn.Linear(24, 40)
    model = DistributedDataParallel(net, process_group=group)
    hook = reef.ddp_hook(model, compression=reef.Compression("auto", density=0.05), allow=["error_feedback"])
    assert (hook.compression == "none") == (hook.compression_prices is None) == (group.size() == 1)
    model(batch(group.rank(), 0)).sum().backward()
    net.weight.data.copy_(net.weight.grad)
    alike(group, net, hook.compression)
    refused(lambda: Run(group, reef.Compression("auto"), by_hook=True), "precise.weight, which is on a device or whose gradient")


SCENES = {
    "equals": equals, "unused": unused, "conserves": conserves, "resumes": lambda group: resumes(group, Path(sys.argv[2])),
    "refuses": refuses, "fails": fails, "leaves": leaves, "killed": killed, "own_group": own_group, "chooses": chooses,
}  # fmt: skip


def main() -> None:
    group = reef.init_process_group(timeout_seconds=1500.0)
    SCENES[sys.argv[1]](group)
    print("done", flush=True)


main()
