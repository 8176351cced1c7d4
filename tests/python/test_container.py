"""A container that kills the plain program."""

import os
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAM = Path(os.environ.get("REEF_BUILD_DIR", "build")).resolve() / "examples" / "bytelm"
sys.path.insert(0, str(EXAMPLES))

import container  # noqa: E402


WHY_NOT = container.why_not()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_trains_where_the_plain_program_is_killed(tmp_path):
    assert container.STATE_BYTES >= 4 * container.LIMIT_BYTES
    outcome = container.train_in_container(PROGRAM, tmp_path)
    assert outcome.killed
    assert outcome.same
    assert outcome.peak_bytes <= container.BUDGET_BYTES
