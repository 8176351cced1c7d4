"""One rank of tests/python/test_optim_norms.py: LAMB and LARS over parts, at every stage, against one process."""

import sys

import torch

import reef

STEPS = 4
RULES = {
    "LAMB": lambda params, **o: reef.optim.LAMB(params, lr=1e-2, weight_decay=0.01, **o),
    "LARS": lambda params, **o: reef.optim.LARS(params, lr=1.0, weight_decay=0.01, trust_coefficient=0.02, **o),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down = torch.nn.Linear(24, 101), torch.nn.LayerNorm(101), torch.nn.Linear(101, 24)
        self.zero = torch.nn.Parameter(torch.zeros(30, 24))  # whose norm is 0 in the first step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(self.norm(self.up(x)))
        return h.pow(2).mean() + (h @ (self.zero + 0.1).t()).sin().mean()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * rank + step))


def alone(make, ranks: int, **options) -> dict[str, torch.Tensor]:
    net = Net()
    optimizer = make(net.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            net(batch(rank, step)).backward()
        for p in net.parameters():
            p.grad.div_(ranks)
        optimizer.step()
    return net.state_dict()


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


group = reef.init_process_group()
rank, ranks = group.rank(), group.size()
for rule, make in RULES.items():
    for state in ("float32", "int8"):
        options = {"state": state, "min_quantized_numel": 500, "maximize": state == "int8"}
        expected = alone(make, ranks, **options)
        assert differences(expected, Net().state_dict()) == list(expected)
        for stage in range(4):
            rows = [{}, {"offload": True}, *([{"shard_degree": 1}] if stage > 0 else [])]
            for row in rows:
                net = Net()
                sharded = reef.shard(net, group, stage=stage, bucket_bytes="5KiB", **row)
                optimizer = make(sharded.parameters(), group=group, **options)
                for step in range(STEPS):
                    if step == 2:  # in the middle: what is saved goes on, in another optimizer
                        saved = sharded.full_optimizer_state_dict(optimizer)
                        optimizer = make(sharded.parameters(), group=group, **options)
                        sharded.load_optimizer_state_dict(optimizer, saved)
                    optimizer.zero_grad()
                    net(batch(rank, step)).backward()
                    optimizer.step()
                found = sharded.full_state_dict()
                assert differences(expected, found) == [], (rule, state, stage, row, differences(expected, found))
                sharded.end()

    # Without the group parts are refused on every rank, and nothing has changed.
    net = Net()
    sharded = reef.shard(net, group, stage=2)
    optimizer = make(sharded.parameters())
    net(batch(rank, 0)).backward()
    before = [p.detach().clone() for p in sharded.parameters()]
    has_elements = any(p.numel() for p in sharded.parameters())
    try:
        optimizer.step()
        assert ranks == 1 or not has_elements
    except ValueError as error:
        assert "give the optimizer the group" in str(error), error
        assert all(torch.equal(p, q) for p, q in zip(sharded.parameters(), before, strict=True))
    sharded.end()
print("done")
sys.stdout.flush()
