#!/usr/bin/env python3
"""Builds and runs tests of a build folder: all of them, those of one stem, or those that a change can have touched.

    run.py build                  all
    run.py build --stem shard     those whose name begins with it: shard_test, shard_layout_test, python.shard, ...
    run.py build --since main     those that what has changed since then can touch (tests/support/include_graph.py)
    run.py build --label device   those with a label of CTest; --without device: the others

Builds what these tests need and no more, then hands over to ctest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import preloaded  # noqa: E402
from include_graph import IncludeGraph, changed_since  # noqa: E402

BIN = Path(sys.executable).parent


def tests_of(build: Path) -> dict[str, dict]:
    """Each test of ctest by name: its labels, among them its sources ("from:") and the targets to be built ("needs:"), and of
    one that runs in Python its interpreter and its environment."""
    out = subprocess.run([BIN / "ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True,
                         check=True).stdout
    found = {}
    for test in json.loads(out)["tests"]:
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        labels = properties.get("LABELS", [])
        found[test["name"]] = {kind: [label.removeprefix(f"{kind}:") for label in labels if label.startswith(f"{kind}:")]
                               for kind in ("from", "needs")}
        found[test["name"]]["labels"] = labels
        is_forked = any(word.endswith("preloaded_pytest.py") for word in test.get("command", []))
        found[test["name"]]["interpreter"] = test["command"][0] if is_forked else None
        found[test["name"]]["environment"] = dict(each.split("=", 1) for each in properties.get("ENVIRONMENT", []))
    return found


def of_stem(tests: dict[str, dict], stem: str) -> list[str]:
    chosen = [name for name in tests if re.match(rf"((python|policy)\.)?{re.escape(stem)}", name)]
    if not chosen:
        stems = sorted({re.sub(r"^(python|policy)\.|_test(\..*)?$", "", name) for name in tests})
        sys.exit(f"no test begins with '{stem}'; there are {', '.join(stems)}")
    return chosen


def of_change(tests: dict[str, dict], commit: str) -> list[str]:
    changed = changed_since(ROOT, commit)
    graph = IncludeGraph(ROOT)
    touched = graph.touched({source for test in tests.values() for source in test["from"]}, changed)
    chosen = [name for name, test in tests.items() if touched & set(test["from"])]
    print(f"{len(changed)} files have changed since {commit}; {len(chosen)} of {len(tests)} tests can be touched by them")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--stem")
    parser.add_argument("--since", metavar="COMMIT")
    parser.add_argument("--label")
    parser.add_argument("--without", metavar="LABEL")
    options = parser.parse_args()
    tests = tests_of(options.build)
    chosen = list(tests)
    if options.stem:
        chosen = of_stem(tests, options.stem)
    if options.since:
        chosen = [name for name in of_change(tests, options.since) if name in chosen]
    if options.label:
        chosen = [name for name in chosen if options.label in tests[name]["labels"]]
    if options.without:
        chosen = [name for name in chosen if options.without not in tests[name]["labels"]]
    if not chosen:
        return 0
    targets = sorted({target for name in chosen for target in tests[name]["needs"]})
    jobs = str(options.jobs)
    built = subprocess.run([BIN / "cmake", "--build", options.build, "--parallel", jobs, "--target", *targets], check=False)
    if built.returncode != 0:
        return built.returncode
    # Many tests mostly wait (for messages, for a rank that is gone to be noticed), so more of them run than compilations would.
    at_a_time = str(3 * options.jobs)
    names = "|".join(re.escape(name) for name in chosen)
    environment = dict(os.environ)
    for address, is_on_device in ((preloaded.ADDRESS, False), (preloaded.DEVICE_ADDRESS, True)):
        forked = [tests[name] for name in chosen if tests[name]["interpreter"]]
        alike = [test for test in forked if ("LD_PRELOAD" in test["environment"]) == is_on_device]
        if alike:
            plainest = min(alike, key=lambda test: len(test["environment"]))
            as_tests = dict(os.environ) | plainest["environment"]
            environment[address], _ = preloaded.start_python_server(plainest["interpreter"], as_tests)
    return subprocess.run([BIN / "ctest", "--test-dir", options.build, "--parallel", at_a_time,
                           "--output-on-failure", "--no-label-summary", "--no-tests=error", "-R", f"^({names})$"],
                          check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
