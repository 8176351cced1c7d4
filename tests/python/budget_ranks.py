"""One rank of test_budget_collectives.py: collectives of torch.distributed inside a budget."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist

import reef

MANY = 1 << 40
N = 200_000  # elements of what is sent: 800 KB


def squeeze(budget, leave_bytes):
    """As an allocation would that needs room: whatever may leave, leaves. What may not is a BudgetError."""
    try:
        budget.set_bytes(budget.use().live_bytes - leave_bytes)
    except reef.BudgetError:
        pass
    budget.set_bytes(MANY)


def made(rank, weight):
    """Recorded, so it is a page."""
    return weight * torch.full((N,), float(rank + 1))


def collective(name, rank, ranks, budget):
    """Whether the collective, with pages leaving while it is under way, gives what it should."""
    weight = torch.ones(1, requires_grad=True)
    mine = made(rank, weight).detach()
    total = sum(r + 1.0 for r in range(ranks))
    filler = [weight * torch.full((N,), 5.0) for _ in range(4)]
    works, results = [], []
    if name == "all_reduce":
        works.append(dist.all_reduce(mine, async_op=True))
        results.append((mine, total))
    elif name == "broadcast":
        works.append(dist.broadcast(mine, 0, async_op=True))
        results.append((mine, 1.0))
    elif name == "all_gather":
        outputs = [(weight * torch.zeros(N)).detach() for _ in range(ranks)]
        works.append(dist.all_gather(outputs, mine, async_op=True))
        results += [(output, r + 1.0) for r, output in enumerate(outputs)]
    elif name == "all_gather_into_tensor":
        output = (weight * torch.zeros(N * ranks)).detach()
        works.append(dist.all_gather_into_tensor(output, mine, async_op=True))
        results += [(output[r * N : (r + 1) * N], r + 1.0) for r in range(ranks)]
    elif name == "send and receive":
        other = (weight * torch.zeros(N)).detach()
        works += [dist.isend(mine, (rank + 1) % ranks), dist.irecv(other, (rank - 1) % ranks)]
        results.append((other, (rank - 1) % ranks + 1.0))
    elif name == "messages under way":
        other, world = (weight * torch.zeros(N)).detach(), dist.group.WORLD
        works += [reef.isend(mine, (rank + 1) % ranks, world), reef.ireceive_into(other, (rank - 1) % ranks, world)]
        works += [reef.isend(mine, (rank + 1) % ranks, world), reef.ireceive((rank - 1) % ranks, world)]
        results.append((other, (rank - 1) % ranks + 1.0))
    elif name == "several at once":
        more = [made(rank, weight).detach() for _ in range(4)]
        works += [dist.all_reduce(one, async_op=True) for one in more]
        results += [(one, total) for one in more]
    squeeze(budget, 4 * N * 3 // 2)
    junk = [torch.full((N,), -1.0) for _ in range(3)]
    for work in works:
        work.wait()
    del junk, filler
    return all(bool((tensor == value).all()) for tensor, value in results)


COLLECTIVES = ["all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "send and receive", "messages under way",
               "several at once"]


def collectives(rank, ranks):
    with reef.budget(MANY) as budget:
        for name in COLLECTIVES:
            for _ in range(3):
                assert collective(name, rank, ranks, budget), name
        # Whatever was held has been let go of: all of it can leave.
        weight = torch.ones(1, requires_grad=True)
        last = made(rank, weight)
        work = dist.all_reduce(last.detach(), async_op=True)
        work.wait()
        del work
        budget.set_bytes(budget.use().live_bytes - 4 * N)
        budget.set_bytes(MANY)
        assert budget.use().evictions > 20
    print("collectives are right")


def ddp(rank, ranks, part):
    """A digest of what DDP trains, unmodified, in `part` of the peak."""

    def train(around):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.ReLU())])
        model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        digest = hashlib.md5()
        with around(model) as inside:
            for step in range(5):
                optimizer.zero_grad()
                x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step * ranks + rank))
                model(x).pow(2).mean().backward()
                optimizer.step()
            peak, evictions = inside.peak_bytes, inside.use().evictions
        for parameter in net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest(), peak, evictions

    plain, peak, _ = train(lambda model: reef.budget(MANY, model))
    found, _, evictions = train(lambda model: reef.budget(int(peak * part), model))
    assert found == plain
    assert evictions > 0
    print("ddp is equal")


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    collectives(rank, ranks) if sys.argv[1] == "collectives" else ddp(rank, ranks, float(sys.argv[2]))
    dist.destroy_process_group()
