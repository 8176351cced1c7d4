"""`make check` runs what a change can touch: no test may be left out that reaches a changed file, and it must leave out
something. And `make timings` reads the logs that ninja and ctest write."""

import importlib.util
import sys
from pathlib import Path

import pytest
from include_graph import IncludeGraph

ROOT = Path(__file__).resolve().parents[2]


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def graph():
    return IncludeGraph(ROOT)


@pytest.fixture(scope="module")
def tests(graph):
    return [name for name in graph.files if name.startswith("tests/") and "test" in Path(name).stem
            and not name.startswith("tests/support/")]


def test_every_source_of_the_library_is_reached_by_a_test(graph, tests):
    reached = set().union(*(graph.reached(test) for test in tests))
    sources = {name for name in graph.files if name.startswith(("csrc/", "include/", "torch_ext/"))}
    assert sorted(name for name in sources - reached if "gloo_shim" not in name and Path(name).name != "precompiled.h") == []


@pytest.mark.parametrize(("changed", "touched", "untouched"), [
    ("csrc/shard/reducer.cpp", ["tests/distributed/shard_test.cpp", "tests/python/test_shard.py", "tests/python/test_bytelm.py"],
     ["tests/unit/bytes_test.cpp", "tests/budget/budget_test.cpp", "tests/unit/swap_test.cpp", "tests/python/test_ledger.py"]),
    ("csrc/page/pager_operators.cpp", ["tests/budget/budget_test.cpp", "tests/python/test_budget_models.py"],
     ["tests/unit/timeline_test.cpp", "tests/kernels/optim_step_test.cpp"]),
    ("csrc/kernels/optim_step/rules.h", ["tests/kernels/optim_step_test.cpp", "tests/python/test_optim.py"],
     ["tests/unit/rendezvous_test.cpp", "tests/unit/chain_test.cpp"]),
    ("csrc/chain/no_lower_avx2.cpp", ["tests/unit/chain_solver_test.cpp"], ["tests/unit/tier_test.cpp"]),
    ("tests/distributed/shard_ranks.py", ["tests/python/test_shard.py"], ["tests/python/test_optim.py"]),
    ("tests/support/ranks.py", ["tests/python/test_ranks.py", "tests/python/test_shard.py"], ["tests/python/test_bytes.py"]),
    ("torch_ext/reef/optim/lion.py", ["tests/python/test_optim.py"], ["tests/python/test_bytes.py"]),
    ("torch_ext/bind/swap.cpp", ["tests/python/test_swap.py"], ["tests/python/test_bytes.py", "tests/unit/swap_test.cpp"]),
])  # fmt: skip
def test_a_change_touches_what_reaches_it_and_no_more(graph, tests, changed, touched, untouched):
    found = graph.touched(tests, [changed])
    assert sorted(set(touched) - found) == []
    assert sorted(set(untouched) & found) == []


@pytest.mark.parametrize("changed", ["tests/CMakeLists.txt", "CMakeLists.txt", "cmake/ReefCompile.cmake", "tests/conftest.py",
                                     "tests/support/preloaded_pytest.py", "tests/support/precompiled.h",
                                     "csrc/precompiled.h"])
def test_what_builds_them_all_touches_them_all(graph, tests, changed):
    assert graph.touched(tests, [changed]) == set(tests)


def test_an_unrelated_file_touches_none(graph, tests):
    assert graph.touched(tests, ["LICENSE"]) == set()


def test_timings_read_ninjas_and_ctests_logs():
    timings = module(ROOT / "cmake" / "timings.py")
    log = ("# ninja log v7\n10\t2510\t0\tCMakeFiles/reef.dir/csrc/part.cpp.o\tab\n"
           "0\t9000\t0\tCMakeFiles/reef.dir/Unity/unity_shard_state_cxx.cxx.o\tcd\n5\t7\t0\tlibreef.so\tef\n"
           "0\t1000\t0\tCMakeFiles/reef.dir/csrc/part.cpp.o\tab\n")
    objects = {timings.source_of(output): seconds for output, seconds in timings.objects_of(log).items()}
    assert objects == {"csrc/part.cpp": 1.0, "reef: shard_state": 9.0}
    assert timings.by_folder(objects) == {"csrc": 1.0, "reef: units": 9.0}
    assert timings.tests_of("a_test 2 1.5\nnever_run 0 0\n---\nfailed\n") == {"a_test": 1.5}
    assert timings.table("title", objects, rows=1).splitlines() == ["title", "      9.0 s  reef: shard_state"]
