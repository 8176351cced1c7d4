"""One rank of tests/python/test_pipeline.py: `pipeline_ranks.py SCENE ARGUMENT...`."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from waits import HEARTBEAT_SECONDS, stop

import reef


class Fork(nn.Module):
    """From one tensor makes two, and a mask that has no gradient."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.left(x), self.right(x), x > 0


class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, left, right, mask):
        return self.layer(left).tanh(), right * mask, mask


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)

    def forward(self, left, right, mask):
        return self.norm(left + right * ~mask)


def chain():
    torch.manual_seed(3)
    return [nn.Linear(4, 5), nn.ReLU(inplace=True), Fork(), Between(), Between(), Join(), nn.Dropout(0.0), nn.Linear(5, 3)]


def data(step):
    torch.manual_seed(100 + step)
    return torch.randn(9, 4), torch.randint(0, 3, (9,))


def through(modules, x):
    for module in modules:
        x = module(*x) if isinstance(x, tuple) else module(x)
    return x


def alone(steps, micro_batches):
    """Losses, and parameters by their names, of one process that takes one micro-batch after another."""
    modules = chain()
    named = {f"{i}.{name}": p for i, module in enumerate(modules) for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = data(step)
        total = 0
        for xs, ys in zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True):
            loss = nn.functional.cross_entropy(through(modules, xs), ys)
            loss.backward()
            total = total + loss.detach()
        for parameter in named.values():
            parameter.grad.div_(micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / micro_batches)
    return losses, named, modules


def check_training(group, stages, **options):
    losses, named, modules = alone(3, 4)
    pipeline = reef.Pipeline(stages, group, micro_batches=4, **options)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    has_first, has_last = (pipeline.schedule.rank_of[0][place] == group.rank() for place in (0, -1))
    for step in range(3):
        x, y = data(step)
        targets = (y,) if has_last else (torch.empty(4),)
        loss = pipeline.step(x if has_first else None, nn.functional.cross_entropy, *targets)
        assert torch.equal(loss, losses[step]), (options, step)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in pipeline.named_parameters():
        assert torch.equal(parameter, named[name]), (options, name)
    x, _ = data(0)
    output = pipeline(x if has_first else None)
    assert (output is not None) == has_last
    if has_last:
        with torch.no_grad():
            assert torch.equal(output, torch.cat([through(modules, part) for part in x.tensor_split(4)]))
    return pipeline


def face():
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()
    pipeline = check_training(group, chain())
    assert {name.split(".")[0] for name, _ in pipeline.named_parameters()} <= pipeline.modules().keys()
    check_training(group, chain(), schedule="gpipe", cuts=[2, 5, 7][: size - 1])
    check_training(group, chain(), schedule="1f1b", hops=[2])
    check_training(group, chain(), schedule="zero_bubble")
    check_training(group, chain(), schedule="zero_bubble", recompute=True)
    check_training(group, chain(), schedule=reef.pipeline_schedule("1f1b", ranks=size, micro_batches=4))
    if size in (2, 3, 4):
        check_training(group, chain(), schedule="interleaved", chunks_per_rank=2)
        check_training(group, chain(), schedule="zbv")
    # Each rank makes its own stages only.
    made = []

    def maker(index):
        def make():
            made.append(index)
            return chain()[index]

        return make

    pipeline = check_training(group, [maker(i) for i in range(8)])
    assert made == [int(name) for name in pipeline.modules()]
    # A Sequential.
    torch.manual_seed(1)
    modules = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    sequential = reef.Pipeline(modules, group, micro_batches=3)
    assert sequential.step(data(0)[0], lambda output: output.square().mean()).requires_grad is False
    own = {name for name, _ in sequential.named_parameters()}
    assert {name for name, parameter in modules.named_parameters() if parameter.grad is not None} == own
    if size == 2:
        replicas(group, rank, size)
    refusals(group, rank, size)


def replicas(group, rank, size):
    """Two pipelines over two ranks, or one over both of which each has all of the model, as one process that takes the batches
    of one after those of the other."""
    for options in [dict(replicas=2), dict(schedule="chimera")]:
        for stage in ("replicate", "optimizer", "gradients", "parameters"):
            modules = chain()
            named = {f"{i}.{name}": p for i, module in enumerate(modules) for name, p in module.named_parameters()}
            whole = torch.optim.AdamW(named.values(), lr=1e-2)
            pipeline = reef.Pipeline(chain(), group, micro_batches=4, shard=dict(stage=stage, bucket_bytes=500), **options)
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
            both = "replicas" in options
            for step in range(3):
                sums, losses = [], []
                x, y = data(step)
                for half in range(2):
                    if both:
                        x, y = data(10 * half + step)
                    parts = list(zip(x.tensor_split(4), y.tensor_split(4), strict=True))
                    for xs, ys in parts if both else parts[half::2]:
                        loss = nn.functional.cross_entropy(through(modules, xs), ys)
                        loss.backward()
                        losses.append(loss.detach())
                    sums.append({name: p.grad.clone() for name, p in named.items()})
                    whole.zero_grad()
                for name, p in named.items():
                    # The first half of chimera's stages are on rank 0 in the direction of even micro-batches.
                    p.grad = (sums[0][name] + sums[1][name]).div_(8 if both else 4)
                if not both:
                    losses = [losses[i] for i in (0, 2, 1, 3)]
                x, y = data(10 * rank + step) if both else data(step)
                loss = pipeline.step(x, nn.functional.cross_entropy, y)
                assert torch.equal(loss, sum(losses) / len(losses)), (options, stage, step)
                norm = reef.clip_grad_norm_(named.values(), 0.5)
                assert pipeline.clip_grad_norm_(0.5) == norm, (options, stage, step)
                whole.step()
                whole.zero_grad()
                optimizer.step()
                for module in pipeline.modules().values():  # as good as optimizer.zero_grad()
                    module.zero_grad()
            x, _ = data(0)
            output = pipeline(x)
            if output is not None:
                with torch.no_grad():
                    assert torch.equal(output, torch.cat([through(modules, part) for part in x.tensor_split(4)])), (options, stage)
    pipeline = reef.Pipeline(chain(), group, micro_batches=4, replicas=2, shard=dict(stage=2))
    pipeline.step(data(0)[0], nn.functional.cross_entropy, data(0)[1])
    try:
        torch.optim.Adafactor(pipeline.parameters(), lr=1e-2).step()
    except ValueError as error:
        assert "needs whole ones" in str(error), error
    else:
        raise AssertionError("an optimizer of whole parameters has stepped parts")


def refusals(group, rank, size):
    def told(call, kind):
        try:
            call()
        except kind as error:
            return str(error)
        raise AssertionError("nothing was refused")

    assert "micro" in told(lambda: reef.Pipeline(chain(), group, micro_batches=0), ValueError)
    assert "gpipe" in told(lambda: reef.Pipeline(chain(), group, schedule="faster"), ValueError)
    assert "reduction" in told(lambda: reef.Pipeline(chain(), group, reduction="median"), ValueError)
    if size == 1:
        return
    asynchronous = reef.Pipeline(chain(), group, micro_batches=4, schedule="pipedream")
    assert "use train()" in told(lambda: asynchronous.step(*data(0)[:1], nn.functional.cross_entropy, data(0)[1]), ValueError)
    assert "rank 1" in told(lambda: reef.Pipeline(chain(), group, micro_batches=2 + rank), ValueError)

    def broken():
        raise KeyError("no such layer of this test")

    kind = KeyError if rank == size - 1 else ValueError
    assert "no such layer" in told(lambda: reef.Pipeline([*[nn.Identity] * (size - 1), broken], group), kind)

    class Sometimes(nn.Module):
        armed = False

        def forward(self, x):
            if Sometimes.armed:
                raise KeyError("the lost key of this test")
            return x

    stages = [nn.Linear(4, 4), *[nn.Linear(4, 4) for _ in range(size - 2)], nn.Sequential(nn.Linear(4, 4), Sometimes())]
    pipeline = reef.Pipeline(stages, group, micro_batches=3)
    mean = torch.Tensor.mean
    pipeline.step(data(0)[0], mean)
    before = [parameter.grad.clone() for parameter in pipeline.parameters()]
    Sometimes.armed = True
    text = told(lambda: pipeline.step(data(1)[0], mean), KeyError if rank == size - 1 else dist.DistError)
    assert "the lost key of this test" in text
    assert rank == size - 1 or f"rank {size - 1}, forward pass of chunk {size - 1} for micro-batch 0" in text
    Sometimes.armed = False
    for parameter, gradient in zip(pipeline.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)
    pipeline.step(data(1)[0], mean)

    def fails(output):
        raise ArithmeticError("the loss of this test")

    text = told(lambda: pipeline.step(data(1)[0], fails), ArithmeticError if rank == size - 1 else dist.DistError)
    assert "the loss of this test" in text
    # A stage gives five features to one that takes six: the error names both shapes on all ranks.
    unequal = reef.Pipeline([*[nn.Linear(4, 4) for _ in range(size - 2)], nn.Linear(4, 5), nn.Linear(6, 3)], group, micro_batches=3)
    text = told(lambda: unequal.step(data(1)[0], mean), RuntimeError if rank == size - 1 else dist.DistError)
    assert "3x5 and 6x3" in text and (rank == size - 1 or f"rank {size - 1}" in text), text
    scale = nn.Parameter(torch.ones(2))
    text = told(lambda: pipeline.step(data(1)[0], lambda output: (output.mean() * scale).sum()), ValueError if rank == size - 1 else dist.DistError)
    assert "a stage or the loss trains a tensor of sizes [2]" in text


def by_torch():
    dist.init_process_group("gloo")
    check_training(dist.group.WORLD, chain())
    dist.destroy_process_group()


class Ends(nn.Module):
    """Ends its process, or stops it for a while, the `at`-th time that it runs forward, or backward."""

    def __init__(self, at, backward, only_stops=False):
        super().__init__()
        self.layer, self.left, self.backward, self.only_stops = nn.Linear(4, 4), at, backward, only_stops

    def end(self, *_):
        if self.left == 0 and self.only_stops:
            stop()
        elif self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def forward(self, x):
        x = self.layer(x)
        if self.backward:
            x.register_hook(self.end)
        else:
            self.end()
        return x


def fault(victim, at, way):
    group = reef.init_process_group(heartbeat_seconds=HEARTBEAT_SECONDS, timeout_seconds=900)
    never = 1000
    if way == "wave":  # the others wait for what its wave has changed
        stages = [Ends(int(at) if group.rank() == int(victim) else never, backward=False)]
        pipeline = reef.Pipeline(stages, group, micro_batches=4, schedule="hetpipe", replicas=group.size(), staleness=1)
    else:
        stages = [Ends(int(at) if rank == int(victim) else never, way == "backward", way == "stopped") for rank in range(group.size())]
        pipeline = reef.Pipeline(stages, group, micro_batches=4)
    try:
        while True:
            if way == "wave":
                pipeline.train([data(0)[:1]] * 4, torch.Tensor.mean, lambda: None)
            else:
                pipeline.step(data(0)[0], torch.Tensor.mean)
    except dist.DistError as error:
        print("told:", str(error).splitlines()[0])


if __name__ == "__main__":
    {"face": face, "by_torch": by_torch, "fault": fault}[sys.argv[1]](*sys.argv[2:])
