"""The example program on a CUDA device, in C++ and in Python: a budget, recomputation and ranks change no bit, it goes on from
a checkpoint that the CPU has written, and on a played device, whose operators are the CPU's, it computes what the CPU does."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from played_device import PLAYED  # noqa: E402
from test_bytelm import (  # noqa: E402, F401 - with the fixtures
    FACES,
    OPTIMIZERS,
    arguments,
    assert_one_sentence,
    command,
    read_log,
    run,
    run_two,
    text,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
of_the_cpu = pytest.mark.skipif(not PLAYED, reason="a real device rounds otherwise than the CPU")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def faces_and(rows):
    """Pairs each row with C++, and the last one also with Python, whose programs take seconds to start."""
    return [("cpp", row) for row in rows] + [("python", list(rows)[-1])]


def assert_same_steps(found, wanted):
    """Asserts that losses and parameters are the same, bit for bit. On a real device, whose attention adds up gradients in any
    order, compares only losses, within a tolerance."""
    found, wanted = read_log(found), read_log(wanted)
    if PLAYED:
        assert found == wanted
    else:
        losses, wanted_losses = ([line["loss"] for line in log[:-1]] for log in (found, wanted))
        assert losses == pytest.approx(wanted_losses, abs=1e-2)


def table_of(out, device):
    """Reads the ledger's table of the device: for each category, the bytes alive now, at the peak, and at most."""
    table = out.split(f"\n{device} ")[1].split("\n\n")[0].splitlines()[1:]
    rows = (re.split(r"  +", line.strip()) for line in table)
    return {name: tuple(columns) for name, *columns in rows if columns}


@of_the_cpu
@pytest.mark.parametrize(("face", "optimizer"), faces_and(OPTIMIZERS))
def test_a_played_device_computes_what_the_cpu_does(face, run, text, optimizer):
    results = {device: run(face, data=[text], losses=device, device=device, **OPTIMIZERS[optimizer]) for device in ("cpu", "cuda")}
    assert [result.returncode for result in results.values()] == [0, 0], results["cuda"].err
    assert Path("cuda").read_text() == Path("cpu").read_text()
    said = [re.findall(r"validation: \S+|sample:.*", result.out) for result in results.values()]
    assert len(said[0]) == 5 and said[1] == said[0]
    cpu, cuda = table_of(results["cpu"].out, "cpu"), table_of(results["cuda"].out, "cuda:0")
    for category in ("parameter", "gradient"):
        assert cuda[category][0] == cpu[category][0] != "0 B", (cuda, cpu)
    assert cuda["optimizer state"][0] != "0 B", cuda  # torch.optim in Python counts its steps on the CPU


@pytest.mark.parametrize("spill", [None, "."])
@pytest.mark.parametrize("face", FACES)
def test_a_budget_on_a_device_changes_no_bit(face, run, text, spill):
    options = dict(data=[text], width=32, context=32, steps=8, device="cuda")
    assert run(face, losses="plain", summary="plain.json", **options).returncode == 0
    peak = json.loads(Path("plain.json").read_text())["peak_bytes"]
    inside = run(face, losses="inside", summary="inside.json", budget=peak * 2 // 3, spill=spill, **options)
    assert inside.returncode == 0, inside.err
    assert "pages that left" in inside.out
    assert json.loads(Path("inside.json").read_text())["peak_bytes"] <= peak * 2 // 3
    assert_same_steps("inside", "plain")


@pytest.mark.parametrize("face", FACES)
def test_a_budget_too_small_for_a_device_is_one_sentence(face, run, text):
    assert_one_sentence(run(face, data=[text], budget=1000, device="cuda"), 1, "out of memory")


@pytest.mark.parametrize("face", FACES)
def test_recomputing_on_a_device_changes_no_bit(face, run, text):
    options = dict(data=[text], width=32, depth=6, context=32, batch=32, steps=4, device="cuda")
    assert run(face, losses="plain", summary="plain.json", **options).returncode == 0
    few = run(face, losses="few", summary="few.json", recompute_within="4MiB", **options)
    assert few.returncode == 0, few.err
    assert "blocks: 6 stages within 4.00 MiB" in few.out
    assert_same_steps("few", "plain")
    peaks = [json.loads(Path(f"{name}.json").read_text())["peak_bytes"] for name in ("plain", "few")]
    assert peaks[1] < 0.8 * peaks[0], peaks


@pytest.mark.parametrize("face", FACES)
def test_goes_on_from_the_checkpoint_of_another_device(face, run, text):
    options = dict(data=[text], optimizer="sgd", state="int8", width=64, sample=0)
    for first in ("cpu", "cuda"):
        then = "cpu" if first == "cuda" else "cuda"
        half = run(face, device=first, save="model", losses=f"{first}.half", **{**options, "steps": 6})
        assert half.returncode == 0, half.err
        for device in (first, then):
            rest = run(face, device=device, resume="model", losses=f"{device}.rest", **options)
            assert rest.returncode == 0, rest.err
        assert len(read_log(f"{then}.rest")) == 7
        assert_same_steps(f"{then}.rest", f"{first}.rest")


@two_devices
@pytest.mark.parametrize(("face", "stage"), faces_and(["replicate", "optimizer", "gradients", "parameters"]))
def test_two_ranks_on_devices_of_their_own(face, run, text, stage):
    options = dict(data=[text], batch=2, state="int8", sample=0, stage=stage)
    for device in ("cpu", "cuda"):
        result = run_two(command(face) + arguments(device=device, losses=device, **options))
        assert result.ok, result.report()
        assert read_log(device) == read_log(f"{device}.rank1")
    assert_same_steps("cuda", "cpu")
