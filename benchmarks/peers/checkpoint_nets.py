"""Real nets at budgets from the least to what nothing is recomputed with: what reef.plan_chain predicts, what a step then takes
and needs, and the best of torch.utils.checkpoint.checkpoint_sequential over all numbers of segments that fit into the same
bytes. ResNet-50 from torchvision, if it is installed, and 24 blocks of transformers' GPT-2. Bytes are those of the ledger, gradients
of parameters included; steps take turns, round by round."""

from __future__ import annotations

import importlib.util
import json
import statistics
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

BUDGETS = 20
ROUNDS = {"ResNet-50": 5, "GPT-2": 3}


class Hidden(nn.Module):
    """A block of GPT-2 as a stage of one tensor."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(x)
        return out if isinstance(out, torch.Tensor) else out[0]


def gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=512, n_head=8, n_positions=512, resid_pdrop=0.1, embd_pdrop=0, attn_pdrop=0)
    config._attn_implementation = "sdpa"
    blocks = [Hidden(GPT2Block(config, layer_idx=i)) for i in range(24)]
    return nn.Sequential(*blocks), torch.randn(2, 512, 512, requires_grad=True)


def resnet50():
    from torchvision.models import resnet50 as make

    net = make(weights=None)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    return nn.Sequential(stem, *blocks, nn.Sequential(net.avgpool, nn.Flatten(), net.fc)), torch.randn(4, 3, 160, 160, requires_grad=True)


class Step:
    """Trains a step and gives its seconds and its peak."""

    def __init__(self, net: nn.Module, x: torch.Tensor) -> None:
        import reef

        self.net, self.x, self.ledger = net, x, reef.Ledger()

    def __call__(self, call) -> tuple[float, int]:
        self.net.zero_grad()
        self.x.grad = None
        torch.manual_seed(1)
        before = sum(self.ledger.live().values())
        self.ledger.reset_peak()
        begin = time.perf_counter()
        call(self.x).square().mean().backward()
        return time.perf_counter() - begin, self.ledger.peak().total - before

    def gradients(self, call) -> list[torch.Tensor]:
        self(call)
        return [p.grad.clone() for p in self.net.parameters()] + [self.x.grad.clone()]


def row(name: str, value: float, unit: str, context: str) -> None:
    print(json.dumps({"name": name, "value": value, "unit": unit, "context": context}), flush=True)


def point(net: str, series: str, peak_bytes: int, times_plain: float) -> None:
    print(json.dumps({"chart": f"{net} in Python", "series": series, "x_name": "peak, MiB", "x": peak_bytes / 2**20,
                      "y_name": "a step, times plain", "y": times_plain}), flush=True)  # fmt: skip


def measure(name: str, net: nn.Sequential, x: torch.Tensor) -> None:
    import reef

    step = Step(net, x)
    step(net)
    net.zero_grad()
    x.grad = None
    chain = reef.Chain(net)
    profile = chain.profile(x, repeats=5)
    least, most = profile.minimum_bytes, profile.natural_peak_bytes
    calls = {"plain": net}
    plans = {}
    for part in range(BUDGETS):
        budget = least + (most - least) * part // (BUDGETS - 1)
        schedule = reef.plan_chain(profile, budget)
        plans[part] = (budget, schedule.cost(profile), schedule)
        calls[part] = lambda x, schedule=schedule: chain.run(schedule, x)
    for segments in range(1, len(net) + 1):
        calls[f"{segments} segments"] = lambda x, n=segments: checkpoint_sequential(net, n, x, use_reentrant=False)
    plain = step.gradients(net)
    equal = sum(all(map(torch.equal, plain, step.gradients(calls[part]))) for part in range(BUDGETS))
    found = {key: [] for key in calls}
    of_predicted = {part: [] for part in plans}
    for _ in range(ROUNDS[name]):
        net.zero_grad()
        x.grad = None
        now = chain.profile(x, repeats=1)  # machines drift
        for key, call in calls.items():
            found[key].append(step(call))
            if key in plans:
                of_predicted[key].append(found[key][-1][0] / plans[key][2].cost(now).seconds)
    seconds = {key: statistics.median(s for s, _ in runs) for key, runs in found.items()}
    peak = {key: max(p for _, p in runs) for key, runs in found.items()}
    row(f"{name}/plain", seconds["plain"], "s", f"peak {peak['plain'] / 2**20:.1f} MiB; {equal} of {BUDGETS} budgets bit-equal")
    for part, (budget, cost, _) in plans.items():
        rivals = [key for key in calls if str(key).endswith("segments") and peak[key] <= max(budget, peak[part])]
        best = min(rivals, key=seconds.get, default=None)
        context = (f"peak {peak[part] / 2**20:.1f} MiB, predicted {cost.peak_bytes / 2**20:.1f} ({100 * (peak[part] / cost.peak_bytes - 1):+.1f} %); "
                   f"{seconds[part] / seconds['plain']:.3f} times plain, predicted {cost.seconds / (cost.seconds - cost.recomputed_seconds):.3f}; "
                   f"{100 * (statistics.median(of_predicted[part]) - 1):+.1f} % of what the profile of the same round predicts")  # fmt: skip
        context += f"; {seconds[part] / seconds[best]:.3f} times checkpoint_sequential's best that fits, {best}" if best else "; no checkpoint_sequential fits"
        row(f"{name}/{budget / 2**20:.1f} MiB", seconds[part], "s", context)
        point(name, "reef", peak[part], seconds[part] / seconds["plain"])
        point(name, "reef, predicted", cost.peak_bytes, cost.seconds / (cost.seconds - cost.recomputed_seconds))
    for key in calls:
        if str(key).endswith("segments"):
            row(f"{name}/checkpoint_sequential, {key}", seconds[key], "s", f"peak {peak[key] / 2**20:.1f} MiB; {seconds[key] / seconds['plain']:.3f} times plain")
            point(name, "torch checkpoint_sequential", peak[key], seconds[key] / seconds["plain"])


def main() -> None:
    torch.manual_seed(0)
    if importlib.util.find_spec("torchvision"):
        measure("ResNet-50", *resnet50())
    measure("GPT-2", *gpt2())


if __name__ == "__main__":
    main()
