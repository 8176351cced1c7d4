"""Files that appear whole or not at all, and the checkpoint of a run."""

from __future__ import annotations

import argparse
import io
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import reef
import torch
from bytelm_pipeline import Pipelined


def cannot_write(path: str, reason: str) -> OSError:
    return OSError(f"cannot write {path}: {reason}; choose a folder that exists, may be written and has room")


def write_whole_file(path: str, content: bytes) -> None:
    """Whatever happens, `path` names either the whole new file or what it named before: through a temporary file
    beside it, flushed to disk and renamed."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the new name is on disk once its folder is
        finally:
            os.close(folder)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise cannot_write(path, error.strerror) from error


def require_writable(path: str) -> None:
    """A long run must not find out at its end."""
    if os.path.isdir(path):
        raise cannot_write(path, "it is a folder")
    if not os.access(os.path.dirname(path) or ".", os.W_OK | os.X_OK):
        raise cannot_write(path, "its folder is missing or may not be written")


IDENTITY = ("width", "depth", "heads", "context", "optimizer", "state")  # what a checkpoint must share with the run


def identity(options: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(options, name) or "torch" for name in IDENTITY}


def first_line(archive: bytes) -> bytes:
    """Of a checkpoint; the archive comes after it. (The archive alone would do, but PyTorch does not verify its
    checksums: a damaged tensor would be read as if nothing had happened.)"""
    return f"bytelm.py checkpoint 1, crc32 {zlib.crc32(archive)}\n".encode()


class Run(NamedTuple):
    """What training changes, on each rank. Where the model is divided, `sharded` has it whole."""

    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer
    batches: torch.Generator
    sharded: reef.Shard | Pipelined | None


def save_checkpoint(path: str, options: argparse.Namespace, run: Run, step: int) -> None:
    """All ranks call it, and rank 0 writes: what one process would have written."""
    if run.sharded:
        model = run.sharded.full_state_dict(rank0_only=True)
        optimizer = run.sharded.full_optimizer_state_dict(run.optimizer, rank0_only=True)
        if not model:
            return
    else:
        model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    state = {
        "fits": identity(options),
        "step": step,
        "batches": run.batches.get_state(),
        "model": model,
        "optimizer": optimizer,
    }
    content = io.BytesIO()
    torch.save(state, content)
    write_whole_file(path, first_line(content.getvalue()) + content.getvalue())


def load_checkpoint(path: str, options: argparse.Namespace, run: Run) -> int:
    """Puts the state back and returns the number of steps done."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}; --resume takes a file that --save wrote") from error
    line, newline, archive = content.partition(b"\n")
    if line + newline != first_line(archive):
        raise RuntimeError(
            f"{path} is damaged or not a checkpoint of bytelm.py: resume from another file that --save wrote, "
            "or begin anew without --resume"
        )
    state = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    for name, value in identity(options).items():
        saved = state["fits"][name]
        if saved != value:
            raise ValueError(
                f"{path} was saved with --{name} {saved}, not {value}: resume it with --{name} {saved}, "
                "or begin anew without --resume"
            )
    if run.sharded:
        run.sharded.load_state_dict(state["model"])
        run.sharded.load_optimizer_state_dict(run.optimizer, state["optimizer"])
    else:
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
    run.batches.set_state(state["batches"])
    return state["step"]
