"""One rank of tests/python/test_nonfinite_gradients.py: `nonfinite_gradients_ranks.py SCENE`. Before each step of training, one
rank's gradient is not finite in a pass of its own, which must leave no trace."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import compressions

import reef

STEPS = 4
VALUES = (torch.nan, torch.inf, -torch.inf)


class Net(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.norm, self.last = torch.nn.Linear(24, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 24, bias=False)
        self.spoil: tuple[str, float] | None = None
        for name, p in self.named_parameters():
            p.register_hook(lambda gradient, name=name: self._spoiled(name, gradient))

    def _spoiled(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if self.spoil is None or self.spoil[0] != name:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[-3:] = self.spoil[1]
        return gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))).pow(2).mean()


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 24, generator=torch.Generator().manual_seed(1000 * rank + number))


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Run:
    """A module that trains by reef.shard, or by reef.ddp_hook."""

    def __init__(self, group, name: str, stage: int | None, **of_optimizer) -> None:
        self.net = Net(group.rank())
        self.rank, self.ranks = group.rank(), group.size()
        compression = compressions.small(name)
        if stage is None:
            self.model = DistributedDataParallel(self.net, process_group=group)
            self.gives = reef.ddp_hook(self.model, compression=compression, bucket_bytes="6KiB")
            self.trained = list(self.net.parameters())
        else:
            self.model = self.net
            self.gives = reef.shard(self.net, group, stage=stage, compression=compression, bucket_bytes="6KiB")
            self.trained = self.gives.parameters()
        if name == "one_bit_adam":
            self.optimizer: torch.optim.Optimizer = reef.optim.OneBitAdam(self.trained, lr=1e-2)
        else:
            self.optimizer = torch.optim.AdamW(self.trained, lr=1e-2, **of_optimizer)

    def backward(self, number: int, scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> None:
        self.optimizer.zero_grad()
        scale(self.model(batch(self.rank, number))).backward()

    def remembered(self) -> dict:
        if isinstance(self.gives, reef.DdpHook):
            return self.gives.sharded_state_dict()
        return self.gives.sharded_optimizer_state_dict(self.optimizer).get("communication", {})

    def void_pass(self, turn: int, scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> reef.NonFiniteElements:
        names = [name for name, _ in self.net.named_parameters()]
        wrong = reef.NonFiniteElements(names[turn % len(names)], turn % self.ranks, 3)
        if self.rank == wrong.rank:
            self.net.spoil = wrong.parameter, VALUES[turn % 3]
        self.backward(100 + turn, scale)
        self.net.spoil = None
        return wrong

    def end(self) -> None:
        if isinstance(self.gives, reef.DdpHook):
            self.gives.close()
        else:
            self.gives.end()


def copies(tensors) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors]


def leaves_no_trace(group, name: str, stage: int | None, turn: int) -> None:
    where = f"{name}, stage {stage}"
    expected, run = Run(group, name, stage), Run(group, name, stage)
    for step in range(STEPS):
        before, remembered = copies(run.trained), dict(run.remembered())
        wrong = run.void_pass(turn + step)
        assert run.gives.nonfinite_gradients() == [wrong], f"{where}: {run.gives.nonfinite_gradients()}, not {wrong}"
        assert all(p.grad.isnan().all() for p in run.trained), where
        if name != "one_bit_adam" or step != compressions.SMALL["warmup_steps"]:  # slices of momentum become whole there
            assert same(run.remembered(), remembered), where
        try:
            run.optimizer.step()
            raise AssertionError(f"{where}: the step was taken")
        except reef.optim.NonFiniteGradient as error:
            assert f"{wrong.parameter} on rank {wrong.rank} (3 elements)" in str(error), f"{where}: {error}"
        assert all(torch.equal(a, b) for a, b in zip(run.trained, before, strict=True)), where
        run.optimizer.zero_grad()
        run.optimizer.step()  # of nothing
        for each in (expected, run):
            each.backward(step)
            assert each.gives.nonfinite_gradients() == []
            each.optimizer.step()
    for each in (expected, run):
        if stage is not None:
            each.gives.gather()
    for (key, a), b in zip(run.net.named_parameters(), expected.net.parameters(), strict=True):
        assert torch.equal(a, b), f"{where}: {key} is off by {(a - b).abs().max()}"
    run.end()
    expected.end()


def is_left_out(group, name: str, stage: int | None, turn: int) -> None:
    """By GradScaler, whichever way the optimizer is told."""
    for fused in (False, True):
        where = f"{name}, stage {stage}, fused {fused}"
        run = Run(group, name, stage, fused=fused)
        divided = stage is not None and stage > 0
        scaler = reef.GradScaler("cpu", init_scale=8.0, group=group) if divided else torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):
            before = copies(run.trained)
            run.void_pass(turn + step, scaler.scale)
            scaler.step(run.optimizer)
            scaler.update()
            assert scaler.get_scale() == 4 / 2**step, where
            assert all(torch.equal(a, b) for a, b in zip(run.trained, before, strict=True)), where
            run.backward(step, scaler.scale)
            scaler.step(run.optimizer)
            scaler.update()
            assert scaler.get_scale() == 4 / 2**step, where
            assert any(p.numel() > 0 and not torch.equal(p, b) for p, b in zip(run.trained, before, strict=True)), where
        run.end()


def by_shard(group) -> None:
    for turn, name in enumerate(compressions.names()):
        if name == "none":
            continue
        leaves_no_trace(group, name, turn % 4, turn)
        if name != "one_bit_adam":
            is_left_out(group, name, (turn + 1) % 4, turn)


def by_hook(group) -> None:
    for turn, name in enumerate(compressions.of_gradients()):
        if name == "none":
            continue
        leaves_no_trace(group, name, None, turn)
        is_left_out(group, name, None, turn)


def main() -> None:
    group = reef.init_process_group()
    {"by_shard": by_shard, "by_hook": by_hook}[sys.argv[1]](group)
    print("done")


if __name__ == "__main__":
    main()
