"""One rank of tests/python/test_one_bit_adam.py: `train STAGE` holds the loss of 1-bit Adam to Adam's; `save DIRECTORY` trains and
writes states of both phases; `load DIRECTORY` goes on from what another number of ranks wrote; `together STAGE` trains with what
else a shard can do; `changed` changes gradients before a step."""

import itertools
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


class Checked(reef.optim.OneBitAdam):
    """Holds each step after the warm-up to its formula, in plain tensors."""

    momenta = 0

    def step(self, closure=None):
        group = self.param_groups[0]
        before = {p: (p.detach().clone(), p.grad, self.state[p]["exp_avg_sq"].clone()) for p in group["params"]
                  if p.grad is not None and "exp_avg_sq" in self.state.get(p, {})}  # fmt: skip
        super().step(closure)
        lr, decay, eps = (torch.tensor(number) for number in (-group["lr"], 1 - group["lr"] * group["weight_decay"], group["eps"]))
        for p, (old, momentum, v) in before.items():
            if p.numel() == 0 or not torch.equal(self.state[p]["exp_avg"], momentum):
                continue  # a gradient
            self.momenta += 1
            v = v.masked_fill(v == 0, torch.inf)
            root = v.double().sqrt().float()  # to the nearest, which torch's own is not everywhere
            assert torch.equal(p.detach(), old * decay + momentum * lr / (root + eps)), "a step by the momentum"


OPTIONS = dict(lr=1e-2, weight_decay=0.01, eps=1e-3)


def run_together(
    group: torch.distributed.ProcessGroup, stage: int, with_: str, steps: int, kind: type, compression: reef.Compression, **options
) -> dict:
    model = net()
    sharded = reef.shard(model, group, stage=stage, bucket_bytes="2KiB", compression=compression, **options)
    made = kind(sharded.parameters(), **OPTIONS)
    optimizer = reef.DelayedUpdate(made, sharded) if with_ == "delayed" else made
    batches = max(steps - group.rank() % 3, 0) if with_ == "join" else steps
    for number in range(batches):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * number + group.rank()))
        optimizer.zero_grad()
        model(x.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        if with_ == "refresh":
            sharded.refresh(made)
    if with_ == "join":
        sharded.join(optimizer.step)
    if with_ == "delayed":
        optimizer.finish()
    found = {name: tensor.clone() for name, tensor in sharded.full_state_dict().items()}
    if kind is Checked:
        numbers = sharded.full_optimizer_state_dict(made)["communication"]["numbers"]
        assert numbers == {"steps": steps, "momentum_steps": max(steps - 2, 0)}, numbers
        # A rank may have only one of the parts.
        assert made.momenta > 0 or steps <= 2 or not any(p.numel() for p in sharded.parameters())
    if with_ == "delayed":
        optimizer.close()
    sharded.end()
    return found


def together(group: torch.distributed.ProcessGroup, stage: int) -> None:
    """In the warm-up AdamW without compression, bit for bit, whatever is beside it; then its formula, alike on all ranks."""
    one_bit = reef.Compression("one_bit_adam", warmup_steps=2)
    for with_, offload, masters in itertools.product(("", "delayed", "join", "refresh"), (False, True), (None, torch.bfloat16)):
        if with_ == "delayed" and (not offload or stage == 3):
            continue
        where = f"stage {stage}, with {with_ or 'nothing'}, offload {offload}, masters {masters}"
        print(where, flush=True)
        options = dict(offload=offload, mixed_precision=masters)
        found = run_together(group, stage, with_, 2, Checked, one_bit, **options)
        expected = run_together(group, stage, with_, 2, reef.optim.AdamW, reef.Compression(), **options)
        assert all(torch.equal(value, expected[name]) for name, value in found.items()), where
        for name, value in run_together(group, stage, with_, 6, Checked, one_bit, **options).items():
            first = value.clone()
            reef.broadcast([first], group)
            assert torch.equal(first, value), f"{where}: {name}"


def changed(group: torch.distributed.ProcessGroup) -> None:
    """By clipping, by a scale, or by hand: refused before anything is stepped, in both phases."""

    def unscaled(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(1))
        scaler.unscale_(optimizer)

    changes = {
        "norm": lambda parameters, _: torch.nn.utils.clip_grad_norm_(parameters, 1e-3),
        "value": lambda parameters, _: torch.nn.utils.clip_grad_value_(parameters, 1e-9),
        "scale": unscaled,
        "data": lambda parameters, _: [p.grad.data.neg_() for p in parameters if p.grad is not None],
    }
    for stage, steps in itertools.product(STAGES, (1, 3)):
        model = net()
        sharded = reef.shard(model, group, stage=stage, compression=reef.Compression("one_bit_adam", warmup_steps=2))
        optimizer = reef.optim.OneBitAdam(sharded.parameters(), **OPTIONS)
        for number in range(steps):
            step(model, optimizer, group, number)
        for name, change in changes.items():
            optimizer.zero_grad()
            loss_of(model, *(tensor[group.rank() :: group.size()] for tensor in examples())).backward()
            before = [p.detach().clone() for p in sharded.parameters()]
            try:
                change(sharded.parameters(), optimizer)
                optimizer.step()
            except (ValueError, RuntimeError) as error:
                is_norm_of_parts = name == "norm" and stage > 0 and group.size() > 1
                assert ("clip_grad_norm_" if is_norm_of_parts else "change no gradient") in str(error), error
            else:
                raise AssertionError(f"{name} at stage {stage} after {steps} steps was not refused")
            assert all(torch.equal(a, b) for a, b in zip(before, sharded.parameters(), strict=True)), name
        step(model, optimizer, group, steps)
        sharded.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = reef.init_process_group()
    if sys.argv[1] in ("train", "together"):
        {"train": train, "together": together}[sys.argv[1]](ranks, int(sys.argv[2]))
    elif sys.argv[1] == "changed":
        changed(ranks)
    else:
        {"save": save, "load": load}[sys.argv[1]](ranks, Path(sys.argv[2]))
    print("done")
