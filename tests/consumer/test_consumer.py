"""The three ways in which another project takes Reef: each configures, builds and runs tests/consumer for real."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import known_objects
import pytest

BUILD_SECONDS = 3000  # all of Reef, without a compiler cache, on a slow machine
BIN = Path(sys.executable).parent


def run(*command, **options):
    out = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=BUILD_SECONDS, **options)
    assert out.returncode == 0, f"{command}\n{out.stdout[-4000:]}\n{out.stderr[-4000:]}"
    return out.stdout


def cache_entry(build_dir, name):
    found = re.search(rf"^{name}:[A-Z]+=(.*)$", (build_dir / "CMakeCache.txt").read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def as_built(build_dir):
    """The same configuration as the build under test."""
    names = ("CMAKE_BUILD_TYPE", "CMAKE_CXX_COMPILER", "CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER",
             "REEF_WITH_CUDA", "REEF_UNITY", "TORCH_CUDA_ARCH_LIST")  # fmt: skip
    return {name: cache_entry(build_dir, name) for name in names}


def with_known_objects(root, build_dir, sources, build):
    """The configuration of a build of `sources` in `build` that compiles only what the build under test has not."""
    run(BIN / "cmake", "--build", build_dir, "--target", "reef_package")  # its objects are those of the sources
    known_objects.describe(build_dir, root, build, sources, sources / "objects.json")
    settings = as_built(build_dir)
    launcher = [sys.executable, known_objects.__file__, str(sources / "objects.json")]
    for language in ("CXX", "CUDA"):
        name = f"CMAKE_{language}_COMPILER_LAUNCHER"
        settings[name] = ";".join([*launcher, *filter(None, [settings[name]])])
    return settings


@pytest.fixture
def sources(root, tmp_path):
    copy = tmp_path / "reef"
    shutil.copytree(root, copy, ignore=lambda _, names: [n for n in names if re.fullmatch(r"build(-.*)?|\.git|\.venv", n)])
    return copy


def build_and_run(root, folder, settings):
    run(BIN / "cmake", "-S", root / "tests" / "consumer", "-B", folder, "-G", "Ninja",
        f"-DREEF_PYTHON={sys.executable}", *(f"-D{name}={value}" for name, value in settings.items()))
    run(BIN / "cmake", "--build", folder, "--parallel", "2")
    assert "optimizer state" in run(folder / "consumer")


def test_installed_package(root, build_dir, tmp_path):
    run(BIN / "cmake", "--install", build_dir, "--prefix", tmp_path / "prefix", "--component", "reef")
    build_and_run(root, tmp_path / "build", as_built(build_dir) | {"CMAKE_PREFIX_PATH": tmp_path / "prefix"})


def test_python_package(root, build_dir, sources, tmp_path):
    defined = with_known_objects(root, build_dir, sources, sources / "build")
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defined.items()]
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target",
        site, f"--config-settings=build-dir={sources / 'build'}", *settings, sources)
    (site / "torch").symlink_to(Path(importlib.util.find_spec("torch").origin).parent)  # where pip would have put it
    environment = {**os.environ, "PYTHONPATH": str(site)}
    assert "ledger agrees" in run(sys.executable, "-m", "reef", "doctor", env=environment)
    cmake_dir = run(sys.executable, "-m", "reef", "--cmake-dir", env=environment).strip()
    assert Path(run(sys.executable, "-m", "reef", "--include-dir", env=environment).strip(), "reef/reef.h").exists()
    build_and_run(root, tmp_path / "build", as_built(build_dir) | {"Reef_DIR": cmake_dir})


def test_subdirectory_without_cuda(root, build_dir, sources):
    defined = with_known_objects(root, build_dir, sources, sources / "build" / "reef")
    build_and_run(root, sources / "build", defined | {"REEF_SOURCE": sources, "REEF_WITH_CUDA": "OFF"})


def test_a_torch_of_another_minor_is_refused_with_a_sentence(root, build_dir, tmp_path):
    run(BIN / "cmake", "--install", build_dir, "--prefix", tmp_path / "prefix", "--component", "reef")
    torch_root = tmp_path / "torch"
    header = torch_root / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    built = cache_entry(build_dir, "CMAKE_PROJECT_VERSION")  # of Reef; only the torch below differs
    assert built
    other = 12 if "2.12" not in run(sys.executable, "-c", "import torch; print(torch.__version__)") else 13
    header.write_text(f"#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR {other}\n#define TORCH_VERSION_PATCH 0\n")
    (torch_root / "lib").mkdir()
    (torch_root / "lib" / "libtorch_cuda.so").touch()
    out = subprocess.run([str(BIN / "cmake"), "-S", str(root / "tests" / "consumer"), "-B", str(tmp_path / "build"), "-G",
                          "Ninja", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}", f"-DTorch_ROOT={torch_root}"],
                         capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert out.returncode != 0
    assert "fits one minor version only" in " ".join(out.stderr.split())
