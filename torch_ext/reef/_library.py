"""Loads the library of operators and classes, once, when the package is imported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch


def _find(relative: str) -> Path | None:
    # An editable install keeps the compiled files in a second folder of the package's path.
    import reef

    for folder in reef.__path__:
        candidate = Path(folder) / relative
        if candidate.exists():
            return candidate
    return None


def _load() -> None:
    path = _find("libreef_ops.so")
    if path is None:
        raise ImportError(
            "reef: libreef_ops.so is not in the package; install it with `pip install .`, or build the project and put "
            "its build/python folder on PYTHONPATH"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"reef: libreef_ops.so does not fit this torch {torch.__version__} ({error}). LibTorch's C++ interface fits "
            "one minor version only: build Reef against this torch, or install the torch it was built for."
        ) from error


_load()


@dataclasses.dataclass(frozen=True)
class BuildInfo:
    """What the library was built from and against; "" where it does not apply."""

    version: str
    git_commit: str
    built_torch: str
    built_cuda: str
    cuda_archs: str
    compiler: str
    loaded_torch: str


def build_info() -> BuildInfo:
    """What the library was built from and against."""
    return BuildInfo(**torch.ops.reef.build_info())


def cmake_dir() -> Path:
    """The folder to give CMake as Reef_ROOT or Reef_DIR, so that ``find_package(Reef CONFIG)`` finds this package."""
    path = _find("lib/cmake/Reef")
    if path is None:
        raise FileNotFoundError(
            "reef: this is a build tree, which has no CMake package; run `cmake --install` or `pip install .`"
        )
    return path


def retry_library() -> Path:
    """A library for ``LD_PRELOAD``, where addresses stay but not for system calls: a call that is given memory that is away
    brings it back and is made once more, instead of failing with ``EFAULT``."""
    path = _find("libreef_retry.so")
    if path is None:
        raise FileNotFoundError("reef: libreef_retry.so is not in the package; install it with `pip install .`")
    return path


def include_dir() -> Path:
    """The folder that holds ``reef/reef.h``."""
    path = _find("include")
    if path is None:
        raise FileNotFoundError("reef: this is a build tree, which has no headers; run `pip install .`")
    return path
