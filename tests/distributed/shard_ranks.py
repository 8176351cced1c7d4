"""One rank of tests/python/test_shard.py: trains at every stage, and by itself what one process gets that accumulates over
all ranks' batches."""

import itertools
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from waits import HEARTBEAT_SECONDS, stop

import reef


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = torch.nn.Embedding(37, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.up, self.down = torch.nn.Linear(24, 101), torch.nn.Linear(101, 24)
        self.never = torch.nn.Parameter(torch.randn(700))
        self.register_buffer("scale", torch.randn(24))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.tokens(batch) * self.scale)
        h = h + self.down(torch.nn.functional.gelu(self.up(h)))
        return -(h @ self.tokens.weight.T).log_softmax(-1)[..., 3].mean()  # tied


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(100 * rank + step))


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "reef AdamW": lambda p: reef.optim.AdamW(p, lr=1e-2),
    "reef int8": lambda p: reef.optim.AdamW(p, lr=1e-2, state="int8", min_quantized_numel=2000),
    "reef int4": lambda p: reef.optim.AdamW(p, lr=1e-2, state="int4_compensated", min_quantized_numel=800),
    "reef bfloat16": lambda p: reef.optim.Adagrad(p, lr=1e-2, state="bfloat16", initial_accumulator_value=0.1),
}


MAX_NORM = 0.02
"""Smaller than the gradients of every step."""


def accumulate(net: Net, ranks: int, step: int) -> None:
    for rank in range(ranks):
        net(batch(rank, step)).backward()
    for p in net.parameters():
        if p.grad is not None:
            p.grad.div_(ranks)


def accumulated(make, ranks: int, norms: list[float]) -> Net:
    net = Net(7)
    optimizer = make(net.parameters())
    for step in range(4):
        optimizer.zero_grad()
        accumulate(net, ranks, step)
        norms.append(reef.clip_grad_norm_(net.parameters(), MAX_NORM))
        optimizer.step()
    return net


def mean_of_all_tokens(group: torch.distributed.ProcessGroup) -> None:
    """Ranks that have different numbers of tokens, and one of them none."""
    rank, ranks = group.rank(), group.size()
    total = sum(range(ranks)) + (ranks == 1)

    def rows(of: int) -> torch.Tensor:
        count = of + (ranks == 1)
        return torch.randn(count, 300, generator=torch.Generator().manual_seed(of))

    def made() -> torch.nn.Linear:
        torch.manual_seed(1)
        return torch.nn.Linear(300, 2)

    expected = made()
    for of in range(ranks):
        (expected(rows(of)).square().sum() / total).backward()
    for reduction in ("sum", "mean"):
        for stage in range(4):
            layer = made()
            sharded = reef.shard(layer, group, stage=stage, reduction=reduction)
            loss = reef.global_mean(layer(rows(rank)).square().sum(), len(rows(rank)), group, reduction=reduction)
            loss.backward()
            for part, name in zip(sharded.parameters(), sharded.names(), strict=True):
                key, _, where = name.partition("[")
                whole = getattr(expected, key).grad
                first, last = map(int, where[:-1].split(":")) if where else (0, whole.numel())
                found = part.grad.flatten()
                if reduction == "sum":
                    assert torch.equal(found, whole.flatten()[first:last]), (name, stage)
                torch.testing.assert_close(found, whole.flatten()[first:last])
    try:
        reef.global_mean(torch.zeros(()), 0, group)
        raise AssertionError("a mean of nothing")
    except ValueError as error:
        assert "a count of 0 together" in str(error)


def overflow(group: torch.distributed.ProcessGroup) -> None:
    """On one rank, in one parameter, of which another has the part: nobody steps."""
    rank, ranks = group.rank(), group.size()
    for name in ("fused AdamW", "foreach AdamW", "reef AdamW", "reef int8"):
        expected = Net(7)
        optimizer = OPTIMIZERS[name](expected.parameters())
        for step in (0, 2, 3):
            optimizer.zero_grad()
            accumulate(expected, ranks, step)
            optimizer.step()
        for stage in range(4):
            net = Net(7)
            sharded = reef.shard(net, group, stage=stage, bucket_bytes="3KiB")
            optimizer = OPTIMIZERS[name](sharded.parameters())
            scaler = reef.GradScaler("cpu", init_scale=1024.0, group=group)
            for step in range(4):
                optimizer.zero_grad()
                loss = net(batch(rank, step))
                if step == 1:
                    loss = loss + net.up.bias[3] * (torch.inf if rank == ranks - 1 else 0)
                scaler.scale(loss).backward()
                if step == 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == (1024 if step == 0 else 512), (name, stage, step)
            for (key, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(p.detach().clone(), q), f"{name}, stage {stage}: {key}"


def mixed_precision(group: torch.distributed.ProcessGroup) -> None:
    """Masters, their rounding and the sums by hand; and a scaled loss in autocast, which needs no option."""
    rank, ranks = group.rank(), group.size()
    for dtype, sums in ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        expected = Net(7).to(dtype)
        masters = [p.detach().clone() for p in Net(7).parameters()]
        optimizer = OPTIMIZERS["foreach AdamW"](masters)
        for step in range(4):
            total = [torch.zeros_like(p, dtype=sums) for p in masters]
            for of in range(ranks):
                expected.zero_grad()
                expected(batch(of, step)).backward()
                for t, p in zip(total, expected.parameters(), strict=True):
                    t += 0 if p.grad is None else p.grad.to(sums)
            for m, t, p in zip(masters, total, expected.parameters(), strict=True):
                m.grad = None if p.grad is None else (t / ranks).float()
            optimizer.step()
            with torch.no_grad():
                for p, m in zip(expected.parameters(), masters, strict=True):
                    p.copy_(m)
        for stage, offload in itertools.product(range(4), (False, True)):
            net = Net(7)
            net.scale = net.scale.to(dtype)
            given = dtype if sums == torch.float32 else reef.MixedPrecision(dtype, sums=sums)
            sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB", mixed_precision=given, offload=offload)
            optimizer = OPTIMIZERS["foreach AdamW"](sharded.parameters())
            for step in range(4):
                optimizer.zero_grad()
                net(batch(rank, step)).backward()
                optimizer.step()
            for (key, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
                assert p.dtype == dtype and torch.equal(p.detach().clone(), q), f"{dtype}, {sums}, stage {stage}, {offload}: {key}"
            saved = sharded.full_state_dict()
            for (key, _), m in zip(net.named_parameters(), masters, strict=True):
                assert torch.equal(saved[key], m), f"{dtype}, {sums}, stage {stage}, {offload}: the master of {key}"

    def trained(net, optimizer, of_ranks, clear):
        for step in range(3):
            optimizer.zero_grad()
            for of in of_ranks:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = net(batch(of, step))
                loss.backward()
            clear(net)
            optimizer.step()

    expected = Net(7)
    trained(expected, OPTIMIZERS["fused AdamW"](expected.parameters()), range(ranks),
            lambda net: [p.grad.div_(ranks) for p in net.parameters() if p.grad is not None])  # fmt: skip
    for stage in range(4):
        net = Net(7)
        sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB")
        trained(net, OPTIMIZERS["fused AdamW"](sharded.parameters()), [rank], lambda net: None)
        for (key, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.detach().clone(), q), f"autocast, stage {stage}: {key}"


def native_order(group: torch.distributed.ProcessGroup) -> None:
    """Within rounding of one process, and the ranks alike."""
    expected = accumulated(OPTIMIZERS["momentum"], group.size(), [])
    for stage in range(4):
        net = Net(7)
        sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB", sum_order="native")
        optimizer = OPTIMIZERS["momentum"](sharded.parameters())
        for step in range(4):
            optimizer.zero_grad()
            net(batch(group.rank(), step)).backward()
            reef.clip_grad_norm_(sharded.parameters(), MAX_NORM, group)
            optimizer.step()
        for (key, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
            found = p.detach().clone()
            torch.testing.assert_close(found, q.detach(), msg=f"stage {stage}: {key}")
            of_first = found.clone()
            reef.broadcast([of_first], group)
            assert torch.equal(of_first, found), f"stage {stage}: {key}"


def delayed_updates(group: torch.distributed.ProcessGroup) -> None:
    """A step beside the next pass: gradients are those at what the step before the last one made."""
    rank, ranks = group.rank(), group.size()
    for name in ("foreach AdamW", "reef AdamW"):
        expected = Net(7)
        optimizer = OPTIMIZERS[name](expected.parameters())
        seen = [p.detach().clone() for p in expected.parameters()]
        for step in range(5):
            newest = [p.detach().clone() for p in expected.parameters()]
            optimizer.zero_grad()
            with torch.no_grad():
                [p.copy_(q) for p, q in zip(expected.parameters(), seen, strict=True)]
            for of in range(ranks):
                expected(batch(of, step)).backward()
            with torch.no_grad():
                [p.copy_(q) for p, q in zip(expected.parameters(), newest, strict=True)]
                [p.grad.div_(ranks) for p in expected.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
            seen = newest
        for stage in range(3):
            net = Net(7)
            sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB", offload=True)
            optimizer = reef.DelayedUpdate(OPTIMIZERS[name](sharded.parameters()), sharded)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for step in range(5):
                optimizer.zero_grad()
                net(batch(rank, step)).backward()
                optimizer.step()
                schedule.step()
            states = sharded.full_optimizer_state_dict(optimizer)["state"]
            assert all(state["step"] <= 5 for state in states.values()), states
            optimizer.finish()
            for (key, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(p.detach().clone(), q), f"{name}, delayed, stage {stage}: {key}"
            optimizer.close()


def go(way: str) -> None:
    """Ends this process, or stops it for a while, with all connections open."""
    if way == "ends":
        os._exit(0)
    stop()


def leave(way: str, phase: str, stage: str) -> None:
    """Rank 1 goes in the second step, in this phase; the others say what they are told."""
    group = reef.init_process_group(heartbeat_seconds=HEARTBEAT_SECONDS)
    net = Net(7)
    sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    try:
        for step in range(3):
            loss = net(batch(group.rank(), step))
            if (group.rank(), step, phase) == (1, 1, "before backward"):
                go(way)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (group.rank(), step, phase) == (1, 1, "after the step"):
                go(way)
    except RuntimeError as error:
        print(f"told: {error}".splitlines()[0])


def main() -> None:
    if len(sys.argv) > 1:
        return leave(*sys.argv[1:])
    torch.ones(16).sqrt()  # MKL chooses its code at the first call
    group = reef.init_process_group()
    rank, ranks = group.rank(), group.size()
    for name, make in OPTIMIZERS.items():
        norms: list[float] = []
        expected = accumulated(make, ranks, norms)
        assert min(norms) > MAX_NORM
        some = ranks // 2 or 1
        for stage, resident, degree in [
            ("replicate", 0, 0), ("optimizer", 0, 0), ("gradients", 0, 0), ("parameters", 0, 0), ("parameters", "12KiB", 0),
            (0, 0, 0), (1, 0, some), (2, 0, some), (3, 10**9, some),
        ]:  # fmt: skip
            net = Net(7 + rank)
            sharded = reef.shard(
                net, group, stage=stage, bucket_bytes="5KiB", resident_bytes=resident, shard_degree=degree
            )
            optimizer = make(sharded.parameters())
            assert all(reef.part_of(p).copy == (rank // degree if degree else 0) for p in sharded.parameters() if stage not in (0, "replicate"))
            for step in range(4):
                optimizer.zero_grad()
                net(batch(rank, step)).backward()
                norm = reef.clip_grad_norm_(sharded.parameters(), MAX_NORM, group)
                assert norm == norms[step], f"{name}, stage {stage}, step {step}: {norm} and {norms[step]}"
                optimizer.step()
            for (key, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(p.detach().clone(), q), f"{name}, stage {stage}, {resident} resident: {key}"
            with torch.no_grad():  # a server
                for request in range(3):
                    found, right = net(batch(rank, 9 + request)), expected(batch(rank, 9 + request))
                    assert torch.equal(found, right), f"{name}, stage {stage}: answer {request}"
            assert len(sharded.names()) == len(sharded.parameters())
            before = sharded.sent_bytes
            with sharded.no_sync():
                net(batch(rank, 5)).backward()
            assert ranks == 1 or before > 0
            if stage not in ("parameters", 3):  # whose forward gathers
                assert sharded.sent_bytes == before
    mean_of_all_tokens(group)
    overflow(group)
    mixed_precision(group)
    native_order(group)
    delayed_updates(group)
    layer = torch.nn.Linear(4, 4 + (rank == 1))
    try:
        reef.shard(layer, group, stage=2, shard_degree=ranks + 1)
        raise AssertionError("more ranks than there are")
    except ValueError as error:
        assert f"shard_degree {ranks + 1}, and the group has {ranks} ranks" in str(error), error
    try:
        reef.shard(layer, group)
        assert ranks == 1
    except ValueError as error:
        assert "parameter weight of Float [5, 4]" in str(error) and ranks > 1, error
    print("done")


if __name__ == "__main__":
    sys.exit(main())
