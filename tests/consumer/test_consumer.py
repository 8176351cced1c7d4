"""The three ways in which another project takes Reef: each configures, builds and runs tests/consumer for real."""

import os
import re
import subprocess
import sys
from pathlib import Path


BIN = Path(sys.executable).parent


def run(*command, **options):
    out = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, **options)
    assert out.returncode == 0, f"{command}\n{out.stdout[-4000:]}\n{out.stderr[-4000:]}"
    return out.stdout


def cache_entry(build_dir, name):
    found = re.search(rf"^{name}:[A-Z]+=(.*)$", (build_dir / "CMakeCache.txt").read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def build_and_run(root, folder, *arguments):
    launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={os.environ['REEF_LAUNCHER']}"] if "REEF_LAUNCHER" in os.environ else []
    run(BIN / "cmake", "-S", root / "tests" / "consumer", "-B", folder, "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DREEF_PYTHON={sys.executable}", *launcher, *arguments)
    run(BIN / "cmake", "--build", folder, "--parallel", "2")
    assert "optimizer state" in run(folder / "consumer")


def test_installed_package(root, build_dir, tmp_path):
    run(BIN / "cmake", "--install", build_dir, "--prefix", tmp_path / "prefix", "--component", "reef")
    build_and_run(root, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}")


def test_python_package(root, build_dir, tmp_path):
    with_cuda = cache_entry(build_dir, "REEF_WITH_CUDA")
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target",
        site, f"--config-settings=cmake.define.REEF_WITH_CUDA={with_cuda}", root)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    assert "ledger agrees" in run(sys.executable, "-m", "reef", "doctor", env=environment)
    cmake_dir = run(sys.executable, "-m", "reef", "--cmake-dir", env=environment).strip()
    assert Path(run(sys.executable, "-m", "reef", "--include-dir", env=environment).strip(), "reef/reef.h").exists()
    build_and_run(root, tmp_path / "build", f"-DReef_DIR={cmake_dir}")


def test_subdirectory(root, build_dir, tmp_path):
    with_cuda = cache_entry(build_dir, "REEF_WITH_CUDA")
    build_and_run(root, tmp_path / "build", f"-DREEF_SOURCE={root}", f"-DREEF_WITH_CUDA={with_cuda}")


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
                         capture_output=True, text=True, timeout=300, check=False)
    assert out.returncode != 0
    assert "fits one minor version only" in " ".join(out.stderr.split())


