"""Which tests a changed file can touch, read from the sources alone.

A file depends on the files it includes or imports; a test in Python also on files that it names, and on the module that
it is named after (on the whole package if there is none). A header depends on what implements it: of an internal header
(csrc/FOLDER/name.h) the sources of its folder that include it, those in csrc/FOLDER/name/ and
those named like it further down, of a public one (include/reef/name.h) the sources in
csrc/name/ and those named like it; where there is none, the sources that include it. Too much rather than too little.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)
IMPORT = re.compile(r"^\s*(?:from|import) +(reef\.)?(\.?[A-Za-z_]\w*)(?: import ([\w, ]+))?", re.MULTILINE)
SOURCES = (".cpp", ".cu", ".cuh", ".h", ".py")
PACKAGE = "torch_ext/reef"

# A change of these can touch any test: how everything is built and started.
EVERYTHING = re.compile(r"(^|/)CMakeLists\.txt$|^(cmake|\.ci)/|^(Makefile|CMakePresets\.json|pyproject\.toml)$"
                        r"|^tests/conftest\.py$|^tests/support/(lsan\.supp|preloaded.*)$|precompiled\.h$")


def tracked(root: Path) -> list[str]:
    """Files of the tree, those that are not yet added to git among them."""
    out = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True,
                         check=True)
    return [line for line in out.stdout.splitlines() if (root / line).exists()]


def changed_since(root: Path, commit: str) -> list[str]:
    """Files that differ from where `commit` and HEAD parted, committed or not, and those that git does not know."""
    def lines(*command: str) -> list[str]:
        return subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True).stdout.splitlines()

    (base,) = lines("merge-base", commit, "HEAD")
    return sorted({*lines("diff", "--name-only", base), *lines("ls-files", "-o", "--exclude-standard")})


class IncludeGraph:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = [name for name in tracked(root) if name.endswith(SOURCES)]
        self.known = set(self.files)

    @cached_property
    def direct(self) -> dict[str, set[str]]:
        """What each file includes or imports by itself."""
        return {name: self._imports(name) if name.endswith(".py") else self._includes(name) for name in self.files}

    def _includes(self, name: str) -> set[str]:
        found = set()
        for include in INCLUDE.findall((self.root / name).read_text()):
            places = [f"{Path(name).parent}/{include}", f"csrc/{include}", f"include/{include}", f"tests/{include}",
                      f"examples/cpp/{include}", f"benchmarks/{include}"]
            found.update(place for place in places if place in self.known)
        return found

    def _imports(self, name: str) -> set[str]:
        found = set()
        for _, module, names in IMPORT.findall((self.root / name).read_text()):
            for one in {module.lstrip("."), *re.split(r"[, ]+", names)}:
                places = [f"{PACKAGE}/{one}.py", f"{PACKAGE}/optim/{one}.py", f"tests/support/{one}.py",
                          f"tests/python/{one}.py", f"examples/python/{one}.py", f"examples/{one}.py"]
                found.update(place for place in places if place in self.known)
        if name.startswith("tests/python/test_"):
            found |= self._tested(name)
        if name.startswith(PACKAGE):
            stem = Path(name).parent.name if "/optim/" in name else Path(name).stem
            found.update(place for place in (f"torch_ext/bind/{stem}.cpp",) if place in self.known)
            if "/optim/" in name:
                found.add("csrc/optim/operators.cpp")
        return found

    def _tested(self, name: str) -> set[str]:
        text, idea = (self.root / name).read_text(), Path(name).stem.removeprefix("test_")
        words = set(re.findall(r"\w+\.\w+", text))
        named = {other for other in self.files if Path(other).name in words and other != name}
        modules = {other: Path(other).parent.name if "/optim/" in other else Path(other).stem
                   for other in self.files if other.startswith(PACKAGE)}
        fitting = {stem for stem in modules.values() if idea == stem or idea.startswith(stem + "_")}
        longest = max(fitting, key=len, default=None)
        if longest is None:
            named |= {other for other in self.files if other.startswith(("examples/", "torch_ext/"))}
        return named | {other for other, stem in modules.items() if longest in (stem, None)}

    @cached_property
    def implementations(self) -> dict[str, set[str]]:
        """The sources that carry out what each header of the library says. A source may name a public one by its own name, or,
        in the folder that the header is named after, by including it before all others."""
        sources = [name for name in self.files if name.startswith("csrc/") and name.endswith((".cpp", ".cu"))]
        first = {source: next(iter(INCLUDE.findall((self.root / source).read_text())), "") for source in sources}
        found = {}
        for header in (name for name in self.files if name.endswith((".h", ".cuh")) and name.startswith(("include/", "csrc/"))):
            stem, folder = Path(header).stem, str(Path(header).parent)
            if header.startswith("csrc/"):
                below = {s for s in sources if s.startswith(f"{folder}/{stem}/")
                         or s.startswith(f"{folder}/") and Path(s).stem == stem and folder != "csrc"}
                beside = {name: {other for other in self.direct[name] if str(Path(other).parent) == folder}
                          for name in self.files if str(Path(name).parent) == folder}
                found[header] = below | {s for s in beside if s in sources and header in self._closure(s, beside)}
            else:
                own = {s for s in sources if Path(s).stem == stem or Path(s).parent.name == stem
                       or f"{Path(s).parent.name}_{Path(s).stem}" == stem 
                       or stem.startswith(f"{Path(s).parent.name}_") and f"include/{first[s]}" == header}
                found[header] = own or {source for source in sources if header in self.direct[source]}
        return found

    @cache
    def reached(self, start: str) -> frozenset[str]:
        """All files that `start` depends on, itself among them."""
        return frozenset(self._closure(start, self.direct, self.implementations))

    @staticmethod
    def _closure(start: str, *edges: dict[str, set[str]]) -> set[str]:
        seen, waiting = {start}, [start]
        while waiting:
            name = waiting.pop()
            new = set().union(*(kind.get(name, ()) for kind in edges)) - seen
            seen |= new
            waiting += new
        return seen

    def touched(self, tests: Iterable[str], changed: Iterable[str]) -> set[str]:
        """Those of `tests` (files) that a change of the files `changed` can touch."""
        changed = set(changed)
        if any(EVERYTHING.search(name) for name in changed):
            return set(tests)
        return {test for test in tests if self.reached(test) & changed}
