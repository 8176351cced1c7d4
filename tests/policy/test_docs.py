"""README and docs say only what runs: their snippets are compiled and run, their commands are known to be tested."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest
from ranks import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = ["README.md", "docs/budget.md", "docs/checkpoint.md", "docs/compress-dense.md", "docs/design.md", "docs/distributed.md", "docs/ledger.md", "docs/optim.md", "docs/shard.md", "docs/gpu-status.md"]

# Commands that a test runs elsewhere, or that would run this very test: where each is run instead.
RUN_ELSEWHERE = {
    "make demo": "by hand; its program by python/test_bytelm.py",
    "make test": ".ci/run",
    "make bench": "by hand, into benchmarks/RESULTS.md",
    "make sanitize": ".ci/run",
    "pip install .": "tests/consumer",
}


def blocks(language):
    return [
        pytest.param(info.strip(), body, id=f"{document}:{body.splitlines()[0][:40]}")
        for document in DOCUMENTS
        for lang, info, body in FENCE.findall((ROOT / document).read_text())
        if lang == language
    ]


@pytest.mark.parametrize(["info", "python_block"], blocks("python"))
def test_python_snippets_run(info, python_block, tmp_path):
    (tmp_path / "snippet.py").write_text(python_block)
    with open(tmp_path / "output", "w+b") as output:
        program = [str(tmp_path / "snippet.py")]
        returncode = preloaded.run(program, dict(os.environ), output, HANG_SECONDS, cwd=str(tmp_path))
        output.seek(0)
        assert returncode == 0, output.read().decode()


def precompiled_flags(build_dir):
    """The flags that tests are compiled with, and the header that is precompiled for them: it begins with torch/torch.h,
    which costs a program 15 s otherwise."""
    commands = json.loads((build_dir / "compile_commands.json").read_text())
    command = next(entry["command"] for entry in commands if entry["file"].endswith("/precompiled.cpp"))
    return re.sub(r"-Werror| -o \S+ -c \S+", "", command).split()[1:]


@pytest.fixture(scope="session")
def compile_cpp(root, build_dir):
    """Compiles a program as a reader would; through ccache, where there is one."""
    from torch.utils.cpp_extension import include_paths, library_paths

    cached = ["ccache"] if shutil.which("ccache") else []
    narrow = ["-std=c++20", "-DNDEBUG", *(f"-isystem{path}" for path in include_paths()), f"-I{root}/include"]
    folders = [*library_paths(), str(build_dir)]
    libraries = [*(f"-L{path}" for path in folders), *(f"-Wl,-rpath,{path}" for path in folders),
                 "-Wl,--allow-shlib-undefined", "-lreef", "-ltorch_cpu", "-lc10"]  # fmt: skip

    def compile_(text, folder):
        (folder / "snippet.cpp").write_text(text)
        flags = precompiled_flags(build_dir) if text.lstrip().startswith("#include <torch/torch.h>") else narrow
        for command in ([*cached, "g++", *flags, "-c", "snippet.cpp"], ["g++", "snippet.o", "-o", "snippet", *libraries]):
            subprocess.run(command, check=True, cwd=folder, timeout=HANG_SECONDS)
        return folder / "snippet"

    return compile_


def is_fragment(block):
    return block.values[0] == "fragment"


@pytest.mark.parametrize(["info", "cpp_block"], [block for block in blocks("cpp") if not is_fragment(block)])
def test_cpp_programs_compile_and_run(info, cpp_block, compile_cpp, tmp_path):
    subprocess.run([compile_cpp(cpp_block, tmp_path)], check=True, cwd=tmp_path, timeout=HANG_SECONDS)


FRAGMENTS = [block for block in blocks("cpp") if is_fragment(block)]

FRAGMENTS_BEGIN = """
#include <torch/torch.h>
#include "reef/reef.h"
#include <cstdlib>
"""

FRAGMENT = """
void fragment_NUMBER() {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::GELU(), torch::nn::Linear(8, 1));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  at::Tensor batch = torch::randn({4, 8});
#line 1 "WHERE"
  BODY
}
"""

FRAGMENTS_END = """
int main(int, char** arguments) {
  void (*const all[])() = {ALL};
  all[std::atoi(arguments[1])]();
}
"""


@pytest.fixture(scope="session")
def fragments(compile_cpp, tmp_path_factory):
    """A program that runs the block whose number it is given. A block marked `cpp fragment` is the inside of a function
    that has a model and an optimizer; torch's headers, 20 s each time, are read once for all of them."""
    functions = [
        FRAGMENT.replace("NUMBER", str(i))
        .replace("WHERE", block.id.split(":")[0])
        .replace("BODY", block.values[1])
        for i, block in enumerate(FRAGMENTS)
    ]
    end = FRAGMENTS_END.replace("ALL", ", ".join(f"fragment_{i}" for i in range(len(FRAGMENTS))))
    return compile_cpp("".join([FRAGMENTS_BEGIN, *functions, end]), tmp_path_factory.mktemp("fragments"))


@pytest.mark.parametrize("number", [pytest.param(i, id=block.id) for i, block in enumerate(FRAGMENTS)])
def test_cpp_fragments_compile_and_run(number, fragments, tmp_path):
    subprocess.run([fragments, str(number)], check=True, cwd=tmp_path, timeout=HANG_SECONDS)


@pytest.mark.parametrize(["info", "sh_block"], blocks("sh"))
def test_commands_run(info, sh_block, root, build_dir, tmp_path):
    for command in (line for line in sh_block.splitlines() if line and not line.startswith("#")):
        command = command.split("   #")[0].strip()
        if command in RUN_ELSEWHERE:
            if command.startswith("make "):
                subprocess.run(["make", "-n", command.split()[1]], cwd=root, check=True, capture_output=True)
            continue
        assert info == "run", f"'{command}' is neither run here nor listed in RUN_ELSEWHERE"
        environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        command = command.replace("build/", f"{build_dir}/").replace("examples/python", f"{root}/examples/python")
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env=environment, timeout=HANG_SECONDS)


def test_links_lead_somewhere(root):
    broken = []
    for document in DOCUMENTS:
        path = root / document
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{document}: {target}")
    assert broken == []
