"""One rank of tests/python/test_shard.py: trains at every stage, and by itself what one process gets that accumulates over
all ranks' batches."""

import os
import sys

import torch

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


def accumulated(make, ranks: int) -> Net:
    net = Net(7)
    optimizer = make(net.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(ranks):
            net(batch(rank, step)).backward()
        for p in net.parameters():
            if p.grad is not None:
                p.grad.div_(ranks)
        optimizer.step()
    return net


def leave(phase: str) -> None:
    """Rank 1 goes in the second step, in this phase; the others say what they are told."""
    group = reef.init_process_group()
    net = Net(7)
    sharded = reef.shard(net, group, stage="optimizer", bucket_bytes="5KiB")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    try:
        for step in range(3):
            if (group.rank(), step, phase) == (1, 1, "before backward"):
                os._exit(0)
            net(batch(group.rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (group.rank(), step, phase) == (1, 1, "after the step"):
                os._exit(0)
    except RuntimeError as error:
        print(f"told: {error}".splitlines()[0])


def main() -> None:
    if len(sys.argv) > 1:
        return leave(sys.argv[1])
    torch.ones(16).sqrt()  # MKL chooses its code at the first call
    group = reef.init_process_group()
    rank, ranks = group.rank(), group.size()
    for name, make in OPTIMIZERS.items():
        expected = accumulated(make, ranks)
        for stage, resident in [
            ("replicate", 0), ("optimizer", 0), ("gradients", 0), ("parameters", 0), ("parameters", "12KiB"), (0, 0), (1, 0),
            (2, 0), (3, 10**9),
        ]:  # fmt: skip
            net = Net(7 + rank)
            sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB", resident_bytes=resident)
            optimizer = make(sharded.parameters())
            for step in range(4):
                optimizer.zero_grad()
                net(batch(rank, step)).backward()
                optimizer.step()
            for (key, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(p.detach().clone(), q), f"{name}, stage {stage}, {resident} resident: {key}"
            assert len(sharded.names()) == len(sharded.parameters())
            before = sharded.sent_bytes
            with sharded.no_sync():
                net(batch(rank, 5)).backward()
            assert ranks == 1 or before > 0
            if stage not in ("parameters", 3):  # whose forward gathers
                assert sharded.sent_bytes == before
    layer = torch.nn.Linear(4, 4 + (rank == 1))
    try:
        reef.shard(layer, group)
        assert ranks == 1
    except ValueError as error:
        assert "parameter weight of Float [5, 4]" in str(error) and ranks > 1, error
    print("done")


if __name__ == "__main__":
    sys.exit(main())
