"""Real nets at budgets from the least to what nothing is recomputed with: what reef.plan_chain predicts, what a step then takes
and needs, and the best of torch.utils.checkpoint.checkpoint_sequential over all numbers of segments that fit into the same
bytes. ResNet-50 from torchvision, if it is installed, and 24 blocks of transformers' GPT-2. Bytes are those of the ledger, gradients
of parameters included; steps take turns, round by round, and what is compared takes turns with it."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import random
import statistics
import time

import reef
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

BUDGETS = 20
HALF = "half of store-all"  # of all but the gradients of parameters


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

    config = GPT2Config(n_embd=512, n_head=8, n_positions=256, resid_pdrop=0.1, embd_pdrop=0, attn_pdrop=0)
    config._attn_implementation = "sdpa"
    blocks = [Hidden(GPT2Block(config, layer_idx=i)) for i in range(24)]
    return nn.Sequential(*blocks), torch.randn(2, 256, 512, requires_grad=True)


def resnet50():
    from torchvision.models import resnet50 as make

    net = make(weights=None)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    return nn.Sequential(stem, *blocks, nn.Sequential(net.avgpool, nn.Flatten(), net.fc)), torch.randn(4, 3, 160, 160, requires_grad=True)


class Step:
    """Trains a step and gives its seconds and its peak."""

    def __init__(self, net: nn.Module, x: torch.Tensor) -> None:
        self.net, self.x, self.ledger = net, x, reef.Ledger()

    def clear(self) -> None:
        self.net.zero_grad()
        self.x.grad = None

    def __call__(self, call) -> tuple[float, int]:
        self.clear()
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


def keep_pages() -> None:
    """What benchmarks/harness.h says of it."""
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_max = -1, -4
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)


class Planned:
    """A schedule, and what was found when it ran."""

    def __init__(self, chain: reef.Chain, profile: reef.ChainProfile, budget: int) -> None:
        self.budget, self.schedule = budget, reef.plan_chain(profile, budget)
        self.cost = self.schedule.cost(profile)
        self.of_plain_predicted = self.cost.seconds / (self.cost.seconds - self.cost.recomputed_seconds)
        self.call = lambda x: chain.run(self.schedule, x)
        self.of_predicted: list[float] = []


class Measurement:
    def __init__(self, name: str, net: nn.Sequential, x: torch.Tensor) -> None:
        self.name, self.net, self.x, self.step = name, net, x, Step(net, x)
        self.step(net)
        self.chain = reef.Chain(net)
        profile = self.profile(repeats=5)
        least, most = profile.minimum_bytes, profile.natural_peak_bytes
        gradients = sum(stage.gradient_bytes for stage in profile.stages)
        budgets = {f"{budget / 2**20:.1f} MiB": budget
                   for budget in (least + (most - least) * part // (BUDGETS - 1) for part in range(BUDGETS))}  # fmt: skip
        budgets[HALF] = gradients + (most - gradients) // 2
        self.planned = {key: Planned(self.chain, profile, budget) for key, budget in budgets.items()}
        self.calls = {"plain": net} | {key: planned.call for key, planned in self.planned.items()}
        for segments in range(1, len(net) + 1):
            self.calls[f"{segments} segments"] = lambda x, n=segments: checkpoint_sequential(net, n, x, use_reentrant=False)
        self.seconds: dict[str, list[float]] = {key: [] for key in self.calls}
        self.peak = dict.fromkeys(self.calls, 0)

    def take(self, key: str) -> float:
        seconds, peak = self.step(self.calls[key])
        self.seconds[key].append(seconds)
        self.peak[key] = max(self.peak[key], peak)
        return seconds

    def profile(self, repeats: int) -> reef.ChainProfile:
        self.step.clear()
        return self.chain.profile(self.x, repeats=repeats)

    def all_in_turn(self, rounds: int) -> None:
        before = self.profile(repeats=1)
        for number in range(rounds):
            taken = {key: self.take(key) for key in random.Random(number).sample(list(self.calls), len(self.calls))}
            # Machines drift: a step is held against what lies between the profiles before and after its round.
            after = self.profile(repeats=1)
            for turn, (key, seconds) in enumerate(taken.items()):
                if planned := self.planned.get(key):
                    first, last = (planned.schedule.cost(profile).seconds for profile in (before, after))
                    planned.of_predicted.append(seconds / (first + (last - first) * (turn + 0.5) / len(taken)))
            before = after

    def of(self, key: str, others: list[str], turns: int) -> list[float]:
        """How many times as long as each of the others a step takes: medians over so many turns, one after the other."""
        ratios = [[] for _ in others]
        for _ in range(turns):
            ours = self.take(key)
            for other, found in zip(others, ratios, strict=True):
                found.append(ours / self.take(other))
        return [statistics.median(found) for found in ratios]

    def rival(self, key: str) -> str | None:
        """The fastest number of segments that fits."""
        room = max(self.planned[key].budget, self.peak[key])
        fits = [other for other in self.calls if other.endswith("segments") and self.peak[other] <= room]
        return min(fits, key=lambda other: statistics.median(self.seconds[other]), default=None)

    def run(self, rounds: int) -> None:
        plain = self.step.gradients(self.net)
        equal = sum(all(map(torch.equal, plain, self.step.gradients(planned.call))) for planned in self.planned.values())
        self.all_in_turn(rounds)
        rivals = {key: self.rival(key) for key in self.planned}
        others = {key: ["plain"] + ([rival] if rival else []) for key, rival in rivals.items()}
        ratios = {key: self.of(key, others[key], 3 * rounds if key == HALF else rounds) for key in self.planned}
        once = statistics.median(self.seconds["plain"])
        row(f"{self.name}/plain", once, "s",
            f"peak {self.peak['plain'] / 2**20:.1f} MiB; {equal} of {len(self.planned)} schedules bit-equal")  # fmt: skip
        for key, planned in self.planned.items():
            peak, cost = self.peak[key], planned.cost
            of_plain, *of_rival = ratios[key]
            context = (f"peak {peak / 2**20:.1f} MiB, predicted {cost.peak_bytes / 2**20:.1f} ({100 * (peak / cost.peak_bytes - 1):+.1f} %); "
                       f"{of_plain:.3f} times plain, predicted {planned.of_plain_predicted:.3f}; "
                       f"{100 * (statistics.median(planned.of_predicted) - 1):+.1f} % of what profiles around it predict; ")  # fmt: skip
            if of_rival:
                context += f"{of_rival[0]:.3f} times checkpoint_sequential's best that fits, {rivals[key]}"
            else:
                context += "no checkpoint_sequential fits"
            row(f"{self.name}/{key}", statistics.median(self.seconds[key]), "s", context)
            point(self.name, "reef", peak, of_plain)
            point(self.name, "reef, predicted", cost.peak_bytes, planned.of_plain_predicted)
        for key in self.calls:
            if key.endswith("segments"):
                seconds = statistics.median(self.seconds[key])
                row(f"{self.name}/checkpoint_sequential, {key}", seconds, "s",
                    f"peak {self.peak[key] / 2**20:.1f} MiB; {seconds / once:.3f} times plain")  # fmt: skip
                point(self.name, "torch checkpoint_sequential", self.peak[key], seconds / once)


def main() -> None:
    keep_pages()
    torch.manual_seed(0)
    if importlib.util.find_spec("torchvision"):
        Measurement("ResNet-50", *resnet50()).run(rounds=9)
    Measurement("GPT-2", *gpt2()).run(rounds=5)


if __name__ == "__main__":
    main()
