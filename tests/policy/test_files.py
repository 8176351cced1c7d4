"""What the tree asks of every file in it."""

import re
import shutil
import subprocess

import pytest

SOURCES = ("*.h", "*.cpp", "*.cu", "*.cuh", "*.py", "*.cmake", "*.sh", "*CMakeLists.txt", "Makefile", ".ci/run")

# Aim at 250 lines, stop at 500. A file listed here needs a reason.
LONG: dict[str, str] = {}


def tracked(root, *patterns):
    out = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "--", *patterns],
                         capture_output=True, text=True, check=True)
    return [root / line for line in out.stdout.splitlines() if (root / line).exists()]


def test_no_file_is_long(root):
    long = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in tracked(root, *SOURCES)}
    assert {name: lines for name, lines in long.items() if lines > 500 and name not in LONG} == {}


def test_nothing_is_unfinished_by_its_own_words(root):
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "not yet imple" + "mented")) + r")\b")
    found = [f"{path.relative_to(root)}:{number}" for path in tracked(root, *SOURCES, "*.md")
             for number, line in enumerate(path.read_text().splitlines(), 1) if words.search(line)]
    assert found == []


def test_names_that_mean_nothing_are_not_used(root):
    vague = re.compile(r"(^|_)(utils?|common|misc|helpers?|manager)(_|\.|$)")
    assert [str(p.relative_to(root)) for p in tracked(root, *SOURCES) if vague.search(p.name)] == []


def test_no_source_is_forgotten_or_globbed(root):
    lists = "\n".join(path.read_text() for path in tracked(root, "*CMakeLists.txt", "tests/*.cmake"))
    assert "GLOB" not in lists
    unlisted = [str(path.relative_to(root)) for path in tracked(root, "csrc/**/*.cpp", "csrc/*.cpp", "csrc/**/*.cu",
                                                                "torch_ext/**/*.cpp", "tests/**/*.cpp")
                if path.name not in lists]
    assert unlisted == []


def test_clang_format_has_nothing_to_change(root):
    formatter = shutil.which("clang-format")
    if formatter is None:
        pytest.skip("clang-format is not installed")
    version = subprocess.run([formatter, "--version"], capture_output=True, text=True, check=True).stdout
    if "version 14." not in version:
        pytest.skip(f"the tree is formatted by clang-format 14, this is {version.strip()}")
    files = [str(path) for path in tracked(root, "*.h", "*.cpp", "*.cu", "*.cuh")]
    out = subprocess.run([formatter, "--dry-run", "-Werror", *files], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-3000:]
