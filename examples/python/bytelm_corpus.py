"""The text: files as two tensors of bytes."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import reef
import torch


def standard_library() -> str:
    interpreter = os.environ.get("REEF_PYTHON")
    if not interpreter:
        return sysconfig.get_paths()["stdlib"]
    question = "import sysconfig; print(sysconfig.get_paths()['stdlib'])"
    try:
        return subprocess.run([interpreter, "-c", question], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"REEF_PYTHON is {interpreter}, which cannot be run: set it to an interpreter") from None


def cannot_read(error: OSError) -> None:
    reason = f"cannot read {error.filename}: {error.strerror}; give --data files and folders that can be read"
    raise OSError(reason) from error


def files_below(folder: str, suffix: str = "", skipped_folders: frozenset[str] = frozenset()) -> list[str]:
    names = []
    for parent, folders, files in os.walk(folder, onerror=cannot_read):
        folders[:] = [name for name in folders if name not in skipped_folders]
        paths = (os.path.join(parent, name) for name in files if name.endswith(suffix))
        names += [os.path.relpath(path, folder) for path in paths if os.path.isfile(path)]
    return [os.path.join(folder, name) for name in sorted(names, key=os.fsencode)]


def corpus_files(paths: list[str]) -> list[str]:
    if not paths:
        return files_below(standard_library(), ".py", frozenset({"__pycache__", "site-packages", "test", "tests"}))
    return [file for path in paths for file in (files_below(path) if os.path.isdir(path) else [path])]


def read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        error.filename = path  # absent if reading, not opening, failed
        cannot_read(error)


def load_corpus(paths: list[str], window: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Training and validation text as uint8 tensors, and a description. Every tenth file, or the last one of fewer,
    is for validation; of a single file the last tenth."""
    files = corpus_files(paths)
    contents = [read_file(file) for file in files]
    if len(files) == 1:
        kept = len(contents[0]) - len(contents[0]) // 10
        training, validation = contents[0][:kept], contents[0][kept:]
        split = "the last tenth of the single file"
    else:
        held_out = {i for i in range(len(files)) if i % 10 == 9 or (len(files) < 10 and i == len(files) - 1)}
        training = b"".join(content for i, content in enumerate(contents) if i not in held_out)
        validation = b"".join(content for i, content in enumerate(contents) if i in held_out)
        split = "the last file" if len(files) < 10 else "every tenth file"
    if not training and not validation:
        raise ValueError("the text is empty: give --data files or folders that hold some")
    if min(len(training), len(validation)) < window:
        raise ValueError(
            f"the text is too short: training has {len(training)} bytes and validation {len(validation)}, and each "
            f"needs {window} (--context and one more): give more --data or a smaller --context"
        )
    description = (
        f"{len(files)} file{'s' if len(files) != 1 else ''}, {reef.format_bytes(len(training))} for training, "
        f"{reef.format_bytes(len(validation))} for validation ({split})"
    )
    # Over memory of the text's own, which is no part of what PyTorch allocates.
    tensors = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (training, validation)]
    return tensors[0], tensors[1], description


def windows_at(text: torch.Tensor, offsets: torch.Tensor, window: int) -> torch.Tensor:
    """Rows of `window` bytes that start at `offsets`: [offsets, window], int64."""
    return text.unfold(0, window, 1)[offsets].long()
