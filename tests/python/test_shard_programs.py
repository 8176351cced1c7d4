"""Random programs under reef.shard against one process (tests/distributed/shard_programs.py is each rank). One that fails is
made as short as it can be and still fails."""

import sys
from pathlib import Path

import pytest
from ranks import Result, run_ranks

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
import shard_programs

PROGRAM = shard_programs.__file__
PROGRAMS = {1: 300, 2: 1100, 3: 400, 4: 200}
"""By how many ranks."""
A_PROGRAM_SECONDS = 240


def run(seed: int, ranks: int, operations: list[int]) -> Result:
    return run_ranks([PROGRAM, str(seed), "1", ",".join(map(str, operations)) or ","], ranks, deadline=A_PROGRAM_SECONDS)


def shortened(seed: int, ranks: int) -> tuple[list[int], Result]:
    """The operations of a program that fails, fewer and fewer, as long as it fails without them."""
    kept = list(range(len(shard_programs.make_program(seed, ranks)[1])))
    result = run(seed, ranks, kept)
    for operation in reversed(kept.copy()):
        if result.ok:
            break
        fewer = [number for number in kept if number != operation]
        shorter = run(seed, ranks, fewer)
        if not shorter.ok:
            kept, result = fewer, shorter
    return kept, result


@pytest.mark.parametrize("ranks", list(PROGRAMS))
def test_programs_are_one_process_or_refused_on_every_rank(ranks):
    first = 10_000 * ranks
    result = run_ranks([PROGRAM, str(first), str(PROGRAMS[ranks])], ranks)
    if result.ok:
        return
    begun = [line for rank in result.ranks for line in rank.output.splitlines() if line.startswith("program ")]
    assert begun, result.report()
    seed = int(begun[-1].split()[1].rstrip(":"))
    config, operations = shard_programs.make_program(seed, ranks)
    kept, short = shortened(seed, ranks)
    program = "\n".join(f"  {number} {operations[number]}" for number in kept)
    pytest.fail(f"program {seed} among {ranks} ranks, {config}\n{program}\n{short.report()}\nat first: {result.report()}")


def test_a_program_that_fails_is_shortened(monkeypatch):
    """The last operation that is kept is the one that fails, and nothing before it is needed."""
    seed = next(s for s in range(100) if [o.name for o in shard_programs.make_program(s, 1)[1]][3:] and any(
        o.name == "save" for o in shard_programs.make_program(s, 1)[1]))
    monkeypatch.setattr(sys.modules[__name__], "run", lambda seed, ranks, operations: Imitated(seed, ranks, operations))
    kept, result = shortened(seed, 1)
    operations = shard_programs.make_program(seed, 1)[1]
    assert [operations[number].name for number in kept] == ["save"] and not result.ok


class Imitated:
    """Fails if a state is saved."""

    def __init__(self, seed: int, ranks: int, operations: list[int]) -> None:
        program = shard_programs.make_program(seed, ranks)[1]
        self.ok = all(program[number].name != "save" for number in operations)
