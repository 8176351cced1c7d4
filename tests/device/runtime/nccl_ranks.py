"""Runs one rank of torch.distributed over played NCCL on cuda:RANK. Called as `nccl_ranks.py played_folder program`."""

import ctypes
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from preloaded import end_at_once

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

HANG_SECONDS, IMPATIENCE_SECONDS = 900, 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8,
          torch.uint8)
OPS = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.PRODUCT: torch.mul}


def of(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the input of `rank` on the CPU: numbers of very different magnitudes."""
    made = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=made).mul(torch.randn(count, generator=made).mul(3).exp()) * 9).to(dtype)


def here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cuda")


def expect(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.is_cuda and torch.equal(found.cpu(), wanted), (found.cpu(), wanted)


def added(dtype: torch.dtype, count: int) -> torch.Tensor:
    total = of(0, count, dtype)
    for rank in range(1, RANKS):
        total = total + of(rank, count, dtype)
    return total


def collectives() -> None:
    count = 100_002
    for dtype in DTYPES:
        mine = here(of(RANK, count, dtype))
        dist.all_reduce(mine)
        expect(mine, added(dtype, count))
        for op, of_two in OPS.items():
            mine = here(of(RANK, count, dtype))
            dist.all_reduce(mine, op)
            expect(mine, of_two(of(0, count, dtype), of(1, count, dtype)))
        part = here(torch.zeros(count // RANKS, dtype=dtype))
        dist.reduce_scatter_tensor(part, here(of(RANK, count, dtype)))
        expect(part, added(dtype, count).chunk(RANKS)[RANK])
        whole = here(torch.zeros(count, dtype=dtype))
        dist.all_gather_into_tensor(whole, part)
        expect(whole, added(dtype, count))
        given = here(of(RANK, 77, dtype))
        dist.broadcast(given, src=1)
        expect(given, of(1, 77, dtype))
        sent, got = here(of(RANK, count, dtype)), here(torch.zeros(count, dtype=dtype))
        dist.all_to_all_single(got, sent)
        expect(got, torch.cat([of(rank, count, dtype).chunk(RANKS)[RANK] for rank in range(RANKS)]))
    mine = here(of(RANK, 1001))
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    expect(mine, of(0, 1001) * 0.5 + of(1, 1001) * 0.5)
    mine = here(of(RANK, 11))
    dist.reduce(mine, dst=1)
    expect(mine, added(torch.float32, 11) if RANK == 1 else of(RANK, 11))
    gathered = [here(torch.zeros(5)) for _ in range(RANKS)]
    dist.all_gather(gathered, here(of(RANK, 5)))
    for rank, each in enumerate(gathered):
        expect(each, of(rank, 5))
    dist.barrier()


def uneven() -> None:
    """Rank r sends r + p + 1 numbers to rank p."""
    def sizes(rank: int) -> list[int]:
        return [rank + peer + 1 for peer in range(RANKS)]

    got = here(torch.zeros(sum(sizes(RANK))))
    dist.all_to_all_single(got, here(of(RANK, sum(sizes(RANK)))), sizes(RANK), sizes(RANK))
    expect(got, torch.cat([of(peer, sum(sizes(peer))).split(sizes(peer))[RANK] for peer in range(RANKS)]))


def messages() -> None:
    peer = 1 - RANK
    data, got = here(of(RANK, 200_000)), here(torch.zeros(200_000))
    if RANK == 0:
        dist.send(data, peer)
        dist.recv(got, peer)
    else:
        dist.recv(got, peer)
        dist.send(data, peer)
    expect(got, of(peer, 200_000))
    got.zero_()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, got, peer)]):
        work.wait()
    expect(got, of(peer, 200_000))


def in_order() -> None:
    """Runs asynchronous collectives on tensors that the program computes and reads. Because of the delays, results are wrong
    if a stream does not wait for another one that it depends on."""
    played = ctypes.CDLL(None)
    for kind in range(3):
        played.played_cuda_delay(kind, 500)
    played.played_cuda_seed(ctypes.c_uint64(RANK + 1))
    pair = dist.new_group([0, 1])
    total = here(torch.zeros(1000))
    for step in range(20):
        mine = here(of(RANK, 1000)) + step
        works = [dist.all_reduce(mine[:400], async_op=True), dist.all_reduce(mine[400:], group=pair, async_op=True)]
        if step % 3 == 0:
            dist.broadcast(total, src=0)
        for work in works:
            work.wait()
        total += mine
    wanted = torch.zeros(1000)
    for step in range(20):
        wanted += (of(0, 1000) + step) + (of(1, 1000) + step)
    expect(total, wanted)


def gradients() -> None:
    """Data parallel training gives the parameters of a single process that averages the losses of all ranks."""
    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))

    shared = torch.nn.parallel.DistributedDataParallel(net().cuda(), device_ids=[RANK], bucket_cap_mb=0.001)
    alone = net()
    shared_steps, alone_steps = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (shared, alone))
    for step in range(5):
        shared_steps.zero_grad()
        shared(here(batch(RANK, step))).square().mean().backward()
        shared_steps.step()
        alone_steps.zero_grad()
        for rank in range(RANKS):
            (alone(batch(rank, step)).square().mean() / RANKS).backward()
        alone_steps.step()
    for found, wanted in zip(shared.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu(), wanted.detach())


def impatient() -> dist.ProcessGroup:
    """Returns a group of all ranks with a timeout of a few seconds, whose communicator is initialized."""
    group = dist.new_group(timeout=timedelta(seconds=IMPATIENCE_SECONDS))
    dist.all_reduce(here(torch.ones(4)), group=group)
    torch.cuda.synchronize()
    return group


def attempt(call) -> None:
    """Prints how the call fails, checks that the device still works, and ends this process."""
    try:
        call().wait()
        torch.cuda.synchronize()
    except dist.DistError as error:
        print("told:", type(error).__name__, flush=True)
        dist.distributed_c10d._abort_process_group()
        print("goes on:", here(torch.ones(3)).add(1).sum().item(), flush=True)
        os._exit(0)


def different() -> None:
    group = impatient()
    attempt(lambda: dist.all_reduce(here(torch.ones(5 + RANK)), group=group, async_op=True))


def killed() -> None:
    group = impatient()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(lambda: dist.all_reduce(here(torch.ones(4)), group=group, async_op=True))


def main() -> None:
    folder, program = Path(sys.argv[1]), sys.argv[2]
    torch.ops.load_library(str(folder / "libplayed_operators.so"))
    torch.set_num_threads(1)
    if hasattr(dist.distributed_c10d, "_register_builtin_nccl_backend"):
        # TORCH_DIST_USE_NCCL2 is read when torch is imported: before this process was forked.
        dist.distributed_c10d._register_builtin_nccl_backend()
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", timeout=timedelta(seconds=HANG_SECONDS))
    globals()[program]()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
    end_at_once()
