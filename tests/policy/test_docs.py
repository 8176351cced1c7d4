"""README and docs say only what runs: their snippets are compiled and run, their commands are known to be tested."""

import os
import re
import shutil
import subprocess
import sys

import pytest

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = ["README.md", "docs/budget.md", "docs/checkpoint.md", "docs/design.md", "docs/distributed.md", "docs/ledger.md", "docs/optim.md", "docs/shard.md", "docs/gpu-status.md"]

# Commands that a test runs elsewhere, or that would run this very test: where each is run instead.
RUN_ELSEWHERE = {
    "make demo": "by hand; its program by python/test_bytelm.py",
    "make test": ".ci/run",
    "make bench": "by hand, into benchmarks/RESULTS.md",
    "make sanitize": ".ci/run",
    "pip install .": "tests/consumer",
}


def blocks(root, language):
    for document in DOCUMENTS:
        for lang, info, body in FENCE.findall((root / document).read_text()):
            if lang == language:
                yield pytest.param(info.strip(), body, id=f"{document}:{body.splitlines()[0][:40]}")


def pytest_generate_tests(metafunc):
    root = __import__("pathlib").Path(__file__).resolve().parents[2]
    for name, language in (("cpp_block", "cpp"), ("python_block", "python"), ("sh_block", "sh")):
        if name in metafunc.fixturenames:
            metafunc.parametrize(["info", name], list(blocks(root, language)))


def test_python_snippets_run(info, python_block, tmp_path):
    subprocess.run([sys.executable, "-c", python_block], check=True, cwd=tmp_path, timeout=120)


@pytest.fixture(scope="session")
def compile_cpp(root, build_dir, tmp_path_factory):
    """Compiles a program as a reader would. The header that nearly all begin with, 10 s each time, is compiled ahead: GCC
    takes torch.h.gch for torch.h where that is the first include, and the text of the snippet stays as it is."""
    from torch.utils.cpp_extension import include_paths, library_paths

    ahead = tmp_path_factory.mktemp("precompiled")
    compiler = ["g++", "-std=c++20", "-DNDEBUG"]
    includes = [f"-isystem{path}" for path in include_paths()] + [f"-I{root}/include"]
    libraries = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    whole = ahead / "whole.h"
    whole.write_text("#include <torch/torch.h>\n")
    (ahead / "torch").mkdir()
    subprocess.run([*compiler, *includes, "-x", "c++-header", whole, "-o", ahead / "torch" / "torch.h.gch"], check=True,
                   timeout=300)

    def compile_(source, program):
        subprocess.run([*compiler, f"-I{ahead}", *includes, source, "-o", program, *libraries, f"-L{build_dir}",
                        f"-Wl,-rpath,{build_dir}", "-Wl,--allow-shlib-undefined", "-lreef", "-ltorch_cpu", "-lc10"],
                       check=True, timeout=300)

    yield compile_
    shutil.rmtree(ahead)  # 700 MB


def test_cpp_snippets_compile_and_run(info, cpp_block, compile_cpp, tmp_path):
    """A block marked `cpp fragment` is the inside of a function that has a model and an optimizer."""
    if info == "fragment":
        cpp_block = FRAGMENT.replace("BODY", cpp_block)
    source = tmp_path / "snippet.cpp"
    source.write_text(cpp_block)
    compile_cpp(source, tmp_path / "snippet")
    subprocess.run([tmp_path / "snippet"], check=True, cwd=tmp_path, timeout=120)


FRAGMENT = """
#include <torch/torch.h>
#include "reef/reef.h"
int main() {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::GELU(), torch::nn::Linear(8, 1));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  at::Tensor batch = torch::randn({4, 8});
  BODY
}
"""


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
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env=environment, timeout=300)


def test_links_lead_somewhere(root):
    broken = []
    for document in DOCUMENTS:
        path = root / document
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{document}: {target}")
    assert broken == []
