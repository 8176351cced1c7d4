"""Where the sources and the build are, for every test in Python."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def build_dir() -> Path:
    if "REEF_BUILD_DIR" not in os.environ:
        pytest.fail("REEF_BUILD_DIR is not set: run these tests by ctest, or name the build folder")
    return Path(os.environ["REEF_BUILD_DIR"])
