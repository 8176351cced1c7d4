"""One rank of tests/python/test_pipeline.py: `pipeline_train_ranks.py SCENE`. Pipeline.train()."""

import sys

import torch
from pipeline_ranks import data
from torch import nn

import reef


def trained():
    """Batch after batch: by a synchronous schedule as steps do, and two versions of weights behind a link."""
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()
    batches = [data(number) for number in range(6)]

    def net():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3))

    def made(**options):
        pipeline = reef.Pipeline(net(), group, **options)
        return pipeline, torch.optim.AdamW([{"params": pipeline.parameters()}], lr=1e-2)

    stepped, optimizer = made(micro_batches=4, schedule="zero_bubble")
    expected = []
    for x, y in batches:
        expected.append(stepped.step(x, nn.functional.cross_entropy, y))
        optimizer.step()
        optimizer.zero_grad()
    pipeline, optimizer = made(micro_batches=4, schedule="zero_bubble")
    rates = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

    def update():
        optimizer.step()
        rates.step()

    losses = [*pipeline.train(iter(batches), nn.functional.cross_entropy, update, count=2),
              *pipeline.train(batches[2:], nn.functional.cross_entropy, update)]  # fmt: skip
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    for (name, parameter), other in zip(pipeline.named_parameters(), stepped.parameters(), strict=True):
        assert torch.equal(parameter, other) and parameter.grad is None, name

    for schedule in ("pipedream", "pipedream_2bw", "pipemare"):
        pipeline, optimizer = made(micro_batches=4, schedule=schedule)
        read = []
        given = ((read.append(1), (x, y))[1] for x, y in batches)
        losses = pipeline.train(given, nn.functional.cross_entropy, optimizer.step, count=6)
        assert len(read) == (6 if rank in (0, size - 1) else 0), read  # others need none
        assert losses.shape == (6,) and losses.isfinite().all(), losses
        versions = pipeline.train_schedule(6).most_versions()
        assert versions[rank] <= 2, versions
    pipeline, optimizer = made(micro_batches=4, schedule="pipemare", synchronous_batches=2, correction_decay=0.135)
    delays = pipeline.train_schedule(20).delays()
    assert delays == tuple((size - 1 - chunk) / 4 for chunk in range(size)), delays
    first = pipeline.train(batches[:2], nn.functional.cross_entropy, optimizer.step)
    flushing, other = made(micro_batches=4)
    assert torch.equal(first, flushing.train(batches[:2], nn.functional.cross_entropy, other.step))
    pipeline.train(batches, nn.functional.cross_entropy, optimizer.step)
    assert reef.pipemare_rate(4.0, 50, 100) == 0.5
    messages = []
    for call in (lambda: pipeline.train([x for x, _ in batches], nn.functional.cross_entropy, optimizer.step),
                 lambda: pipeline.train(iter(batches[:2]), nn.functional.cross_entropy, optimizer.step, count=5),
                 lambda: pipeline.train(iter(batches), nn.functional.cross_entropy, optimizer.step),
                 lambda: pipeline.step(*batches[0][:1], nn.functional.cross_entropy, batches[0][1])):  # fmt: skip
        try:
            call()
        except (ValueError, TypeError, torch.distributed.DistError) as error:
            messages.append(str(error))
    expected = "a Tensor as a batch", "was to read batch 2, and there were 2 batches", "give count", "use train()"
    for message, words in zip(messages, expected, strict=True):
        assert words in message, messages


def waves():
    """Virtual workers, each cut in its own way: against one process that follows the rules, and a Chain, and training by steps."""
    group = reef.init_process_group()
    rank, size = group.rank(), group.size()
    micro_batches, workers = 2, 2 if size % 2 == 0 else size

    def net():
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))

    def batches(worker):
        return [data(10 * number + worker) for number in range(4)]

    def optimizer_of(parameters):
        return torch.optim.SGD([{"params": parameters}], lr=0.1, momentum=0.9)

    def trained_alone(staleness):
        nets = [net() for _ in range(workers)]
        optimizers = [optimizer_of(one.parameters()) for one in nets]
        newest = [[parameter.detach().clone() for parameter in one.parameters()] for one in nets]
        common = [parameter.clone() for parameter in newest[0]]
        versions, changes, merged = [[list(each)] for each in newest], [], 0
        for wave in range(4):
            changes.append([])
            for worker, (one, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                before = newest[worker]
                x, y = batches(worker)[wave]
                for m, (xs, ys) in enumerate(zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True)):
                    with torch.no_grad():
                        for parameter, value in zip(one.parameters(), versions[worker][max(0, wave * micro_batches + m + 1 - micro_batches)], strict=True):
                            parameter.copy_(value)
                    nn.functional.cross_entropy(one(xs), ys).backward()
                    with torch.no_grad():
                        for parameter, value in zip(one.parameters(), newest[worker], strict=True):
                            parameter.copy_(value)
                    optimizer.step()
                    optimizer.zero_grad()
                    newest[worker] = [parameter.detach().clone() for parameter in one.parameters()]
                    versions[worker].append(newest[worker])
                changes[wave].append([now - then for now, then in zip(newest[worker], before, strict=True)])
            until = 4 if wave == 3 else max(0, wave + 1 - staleness)
            for of_workers in changes[merged:until]:
                for of_worker in of_workers:
                    common = [value + change for value, change in zip(common, of_worker, strict=True)]
            if merged == until:
                continue
            merged = until
            for worker in range(workers):
                newest[worker] = list(common)
                for of_workers in changes[until:]:
                    newest[worker] = [value + change for value, change in zip(newest[worker], of_workers[worker], strict=True)]
                versions[worker][-1] = newest[worker]
        return common

    names = list(net().state_dict())
    for staleness in (0, 1):
        expected = dict(zip(names, trained_alone(staleness), strict=True))
        each = [[1 + 2 * worker] for worker in range(workers)] if size > workers else []
        for cuts in [[], each] if each else [[]]:
            pipeline = reef.Pipeline(reef.Chain(net()), group, micro_batches=micro_batches, schedule="hetpipe", replicas=workers,
                                     staleness=staleness, replica_cuts=cuts)  # fmt: skip
            assert pipeline.cuts == (cuts[rank % workers] if cuts else [3] if size > workers else []), pipeline.cuts
            optimizer = optimizer_of(pipeline.parameters())
            losses = pipeline.train(batches(rank % workers), nn.functional.cross_entropy, optimizer.step)
            assert losses.shape == (4,)
            for name, value in pipeline.full_state_dict().items():
                assert torch.equal(value, expected[name]), (staleness, cuts, name)
    # train() runs step after step for sharded chunks and for schedules of two directions.
    for options in [dict(replicas=size, shard=dict(stage="gradients"))] + ([dict(schedule="chimera")] if size % 2 == 0 else []):
        one, other = (reef.Pipeline(net(), group, micro_batches=4, **options) for _ in range(2))
        step, update = (torch.optim.AdamW([{"params": pipeline.parameters()}], lr=0.1) for pipeline in (one, other))
        expected = []
        for x, y in batches(0):
            expected.append(one.step(x, nn.functional.cross_entropy, y))
            step.step()
            step.zero_grad()
        assert torch.equal(other.train(batches(0), nn.functional.cross_entropy, update.step), torch.stack(expected))
        for ours, theirs in zip(other.parameters(), one.parameters(), strict=True):
            assert torch.equal(ours, theirs) and ours.grad is None

    class Own(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    for stages, words in ((reef.Chain([lambda x: x] * size), "is a function, not a torch.nn.Module"), (Own(*net()), "Own has a forward of its own")):
        try:
            reef.Pipeline(stages, group)
        except (TypeError, ValueError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


if __name__ == "__main__":
    {"trained": trained, "waves": waves}[sys.argv[1]]()
