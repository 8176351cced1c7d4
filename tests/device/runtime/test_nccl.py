"""LibTorch's unmodified NCCL groups, between processes with played NCCL on played devices."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import beside_each_other, run_ranks

PROGRAM = Path(__file__).with_name("nccl_ranks.py")
GROUPS = {"ProcessGroupNCCL": "0", "ProcessGroupNCCL2": "1"}
"""The implementation of "nccl" that TORCH_DIST_USE_NCCL2 selects in torch 2.15. Older versions have the first only."""


@pytest.fixture
def played(build_dir) -> Path:
    return build_dir / "played"


def run(played: Path, program: str, group: str):
    env = {"TORCH_DIST_USE_NCCL2": GROUPS[group], "TORCH_NCCL_BLOCKING_WAIT": "1"}
    return run_ranks([str(PROGRAM), str(played), program], 2, env=env)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("program", ["collectives", "uneven", "messages", "in_order", "gradients"])
def test_programs_compute_what_they_compute_alone(played, program, group):
    result = run(played, program, group)
    assert result.ok, result.report()
    assert all(rank.output.endswith("done\n") for rank in result.ranks), result.ranks


@pytest.fixture(scope="module")
def in_trouble(build_dir) -> dict:
    """Runs all programs in which LibTorch gives up after a timeout. They run at the same time, because they mostly wait."""
    rows = [(program, group) for program in ("killed", "different") for group in GROUPS]
    return beside_each_other(lambda row: run(build_dir / "played", *row).ranks, rows)


@pytest.mark.parametrize("group", GROUPS)
def test_a_rank_that_is_killed_leaves_the_other_waiting_until_it_aborts(in_trouble, group):
    left, killed = in_trouble["killed", group]
    assert killed.signal == signal.SIGKILL, killed.excerpt()
    assert left.ok, left.excerpt()
    assert "ncclAllReduce of 4 float32, sum was aborted while it waited for rank 1" in left.output
    assert "told: DistBackendError\n" in left.output and "goes on: 6.0\n" in left.output


@pytest.mark.parametrize("group", GROUPS)
def test_different_calls_are_told_by_both_ranks(in_trouble, group):
    for rank in in_trouble["different", group]:
        assert "told: DistBackendError\n" in rank.output and "goes on: 6.0\n" in rank.output, rank.excerpt()
        begin = f"played NCCL: rank {rank.rank} of 2:"
        said = next(line for line in rank.output.splitlines() if line.startswith(begin))
        assert "make different calls" in said
        assert "rank 0 is in ncclAllReduce of 5 float32, sum" in said
        assert "rank 1 is in ncclAllReduce of 6 float32, sum" in said


def names(library: Path, *which: str) -> set[str]:
    out = subprocess.run(["nm", "-D", *which, str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in out.splitlines()}


def test_nothing_that_libtorch_imports_comes_from_the_real_library(played):
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    imported = {name for library in (torch / "lib").glob("lib*.so*") for name in names(library, "--undefined-only")
                if name.startswith("nccl")}
    assert "ncclAllReduce" in imported
    assert imported - names(played / "libplayed_nccl.so", "--defined-only") == set()


def test_it_is_found_instead_of_the_real_library():
    program = "import torch, ctypes; print(ctypes.CDLL(None).ncclCommSuspend(None, 0), torch.cuda.nccl.version())"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("5 (2, ") and "ncclCommSuspend is not played" in out.stderr
