"""One rank of tests/python/test_price_exchange.py."""

import torch

import reef

group = reef.init_process_group()
fit = reef.measure_link(group)
work = reef.measure_exchange_work(group, density=0.01)
prices = reef.price_exchange(fit.link, 100_000, ranks=group.size(), work=work, density=0.01)
assert len(fit.samples) == 20, fit
assert reef.fit_link(fit.samples).link == fit.link
everywhere = [None] * group.size()
torch.distributed.all_gather_object(everywhere, (fit, work, prices), group)
assert all(each == (fit, work, prices) for each in everywhere), everywhere
assert str(fit).endswith("of 20 measurements") and str(fit.link) in str(fit), str(fit)
print(fit)
print(prices)
print("done")
