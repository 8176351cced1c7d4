"""One rank of tests/python/test_shard_cuda.py: `METHOD DEVICE` trains at every stage with parameters on that device and on the
CPU, by a method that sends some elements. Ranks share the device, for which NCCL has no place: their group is gloo's. Each
product and sum is rounded by itself on both, so what is applied, held back and told of is the same, bit for bit."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from whole_number_net import Net, gradients

import reef

STEPS = 5
VOID = 2
"""The step in which a rank has a gradient that is not finite."""


def gradients_of_step(rank: int, step: int) -> dict[str, torch.Tensor]:
    own = gradients(rank, step)
    if step == VOID and rank == dist.get_world_size() - 1:
        own["vector"][5] = float("nan")
        own["cube"][1] = float("inf")
    return own


def of_all(state: dict, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in nested dicts, by its path."""
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[f"{name}/{key}"] = value.cpu()
        elif isinstance(value, dict):
            found.update(of_all(value, f"{name}/{key}"))
    return found


def trained(method: reef.Compression, device: str, **options) -> tuple[dict[str, torch.Tensor], list]:
    net = Net().to(device)
    sharded = reef.shard(net, dist.group.WORLD, compression=method, bucket_bytes=2048, **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    told = []
    for step in range(STEPS):
        optimizer.zero_grad()
        own = gradients_of_step(dist.get_rank(), step)
        torch.stack([(p * own[name].to(p.device)).sum() for name, p in net.named_parameters()]).sum().backward()
        try:
            optimizer.step()
        except reef.optim.NonFiniteGradient:
            assert step == VOID, step
        told.append([(found.parameter, found.rank, found.elements) for found in sharded.nonfinite_gradients()])
    state = of_all({"module": sharded.full_state_dict(), "optimizer": sharded.full_optimizer_state_dict(optimizer)})
    sharded.end()
    return state, told


def main(name: str, device: str) -> None:
    dist.init_process_group("gloo")
    # A norm that is exceeded, and whose squares are whole numbers.
    more = {"momentum": 0.9, "max_norm": 20000} if name == "dgc" else {}
    method = reef.Compression(name, density={0: 0.1, 2: 0.03}, **more)
    rows = [{"stage": stage, "reduction": "sum"} for stage in ("replicate", "optimizer", "gradients", "parameters")]
    rows += [{"stage": "optimizer", "reduction": "mean"}, {"stage": "parameters", "reduction": "sum", "offload": True}]
    rows += [{"stage": "optimizer", "reduction": "sum", "shard_degree": 1}]
    for row in rows:
        (found, told), (expected, expected_told) = trained(method, device, **row), trained(method, "cpu", **row)
        assert told == expected_told, f"{row}: {told} and not {expected_told}"
        assert {parameter for parameter, _, _ in told[VOID]} == {"vector", "cube"}, told
        assert found.keys() == expected.keys(), row
        assert any(path.endswith("residual") and values.any() for path, values in found.items()), row
        for path, values in expected.items():
            assert torch.equal(found[path], values), f"{row}: {path}"
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    main(sys.argv[1], sys.argv[2])
