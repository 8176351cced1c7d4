#!/usr/bin/env python3
"""What building and testing cost: the dearest objects and tests of a build folder, and the sums by folder.

    timings.py build

Reads ninja's log (the last time that each output was made; with a compiler cache, that may be a look-up) and ctest's
(the mean over its runs). Seconds are those on the clock: with as many jobs as cores, about a processor's.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROWS = 30


def objects_of(log: str) -> dict[str, float]:
    """Seconds that each object and precompiled header took, by its path, from the text of a .ninja_log."""
    seconds = {}
    for line in log.splitlines():
        if line.startswith("#"):
            continue
        begin, end, _, output, _ = line.split("\t")
        if output.endswith((".o", ".gch")):
            seconds[output] = (int(end) - int(begin)) / 1000
    return seconds


def source_of(output: str) -> str:
    """The source's path in the tree, or TARGET: UNIT for several that are compiled together."""
    folder, target, rest = re.fullmatch(r"(.*?)CMakeFiles/([^/]+)\.dir/(.*)", output).groups()
    if unit := re.fullmatch(r"Unity/unity_(\w+)_c(?:xx|u)\.\w+\.o", rest):
        return f"{target}: {unit[1]}"
    return folder + rest.removesuffix(".o")


def folder_of(source: str) -> str:
    return source.split(":")[0] + ": units" if ":" in source else str(Path(source).parent)


def tests_of(log: str) -> dict[str, float]:
    """Seconds that each test took, from the text of a CTestCostData.txt."""
    rows = (line.split(" ") for line in log.split("---")[0].splitlines())
    return {name: float(seconds) for name, runs, seconds in rows if int(runs) > 0}


def table(title: str, seconds: dict[str, float], rows: int = ROWS) -> str:
    dearest = sorted(seconds.items(), key=lambda item: -item[1])[:rows]
    return "\n".join([title, *(f"{value:9.1f} s  {name}" for name, value in dearest)])


def by_folder(seconds: dict[str, float]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for source, value in seconds.items():
        sums[folder_of(source)] += value
    return dict(sums)


def main(build: Path) -> None:
    log = build / ".ninja_log"
    if not log.exists():
        sys.exit(f"{build} has no .ninja_log: build it first")
    objects = {source_of(output): value for output, value in objects_of(log.read_text()).items()}
    print(table(f"{len(objects)} objects, {sum(objects.values()):.0f} s; the dearest:", objects))
    print(table("\nobjects by folder:", by_folder(objects)))
    costs = build / "Testing" / "Temporary" / "CTestCostData.txt"
    if costs.exists():
        tests = tests_of(costs.read_text())
        print(table(f"\n{len(tests)} tests, {sum(tests.values()):.0f} s; the dearest:", tests))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
