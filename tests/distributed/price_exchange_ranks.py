"""One rank of tests/python/test_price_exchange.py."""

import torch

import reef

group = reef.init_process_group()
fit = reef.measure_link(group)
work = reef.measure_exchange_work(group, density=0.01)
prices = reef.price_exchange(fit.link, 100_000, ranks=group.size(), work=work, density=0.01)
assert len(fit.samples) == 20, fit
try:
    assert reef.fit_link(fit.samples) == fit
except ValueError:  # where this machine is so noisy
    assert reef.bound_link(fit.samples) == fit
everywhere = [None] * group.size()
torch.distributed.all_gather_object(everywhere, (fit, work, prices), group)
assert all(each == (fit, work, prices) for each in everywhere), everywhere
assert str(fit).endswith("of 20 measurements") and str(fit.link) in str(fit), str(fit)
print(fit)
print(prices)


def trained(stage: int, **options) -> tuple[torch.Tensor, reef.Shard]:
    torch.manual_seed(3)
    net = torch.nn.Linear(100, 50)
    sharded = reef.shard(net, group, stage=stage, **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 100, generator=torch.Generator().manual_seed(10 * step + group.rank()))).pow(2).mean().backward()
        optimizer.step()
    return sharded.full_state_dict()["weight"], sharded


for stage in range(4):
    for allow, only in ((), None), (("exact",), "none"), (("unbiased",), "qsgd"):
        auto = reef.Compression("auto", density=0.05)
        weight, sharded = trained(stage, compression=auto, allow=allow)
        method, prices = sharded.compression, sharded.compression_prices
        assert prices.fastest(allow).method == method, (method, prices)
        assert method == (only or method)
        torch.distributed.all_gather_object(everywhere, (method, prices), group)
        assert all(each == (method, prices) for each in everywhere), everywhere
        density = 0.05 if method in ("topk", "gtopk", "oktopk") else None
        named, sharded = trained(stage, compression=reef.Compression(method, density=density))
        assert torch.equal(weight, named), (stage, method)
        assert sharded.compression == method and sharded.compression_prices is None
for options, says in (
    ({"allow": ["exact"]}, "which chooses nothing"),
    ({"compression": "auto", "allow": ["biased"]}, "no class of methods"),
):
    try:
        reef.shard(torch.nn.Linear(2, 2), group, **options)
        raise AssertionError(f"{options} were not refused")
    except ValueError as error:
        assert says in str(error), error
print("done")
