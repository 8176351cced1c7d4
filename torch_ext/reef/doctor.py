"""``python -m reef doctor``: what this installation is made of, what matches and what does not, and one real training
step. Exit code 0 if all is well, 1 if something does not match."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import subprocess
import sys

import torch

import reef


@dataclasses.dataclass(frozen=True)
class Finding:
    what: str
    value: str
    ok: bool = True
    advice: str = ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _versions() -> list[Finding]:
    info = reef.build_info()
    found = [
        Finding("reef", f"{info.version} {info.git_commit}".strip()),
        Finding("python", f"{platform.python_version()} at {sys.executable}"),
        Finding("torch", torch.__version__),
        Finding("built for torch", info.built_torch),
        Finding("built by", info.compiler),
        Finding("C++11 ABI of torch", str(torch.compiled_with_cxx11_abi())),
    ]
    if _minor(info.built_torch) != _minor(torch.__version__):
        found.append(
            Finding("torch fits", "no", False, f"build Reef against torch {torch.__version__}, or install "
                    f"torch {_minor(info.built_torch)}")
        )
    return found


def _cuda() -> list[Finding]:
    info = reef.build_info()
    built = info.built_cuda or "none (CPU only)"
    found = [Finding("built for CUDA", f"{built} {info.cuda_archs}".strip()),
             Finding("torch's CUDA", torch.version.cuda or "none")]
    if info.built_cuda and torch.version.cuda and info.built_cuda.split(".")[0] != torch.version.cuda.split(".")[0]:
        found.append(Finding("CUDA major fits", "no", False, "build Reef with the toolkit of torch's CUDA major version"))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found.append(Finding("CUDA devices", str(devices)))
    for index in range(devices):
        major, minor = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)} ({major}.{minor})"
        built_archs = [arch.split("+")[0].rstrip("a") for arch in info.cuda_archs.split()]
        fits = not info.built_cuda or any(arch.split(".")[0] == str(major) for arch in built_archs)
        found.append(Finding(f"cuda:{index}", name, fits, "" if fits else
                             f"build Reef with TORCH_CUDA_ARCH_LIST={major}.{minor}"))
    return found


def _tools() -> list[Finding]:
    found = []
    for tool in ("g++", "cmake", "nvcc"):
        path = shutil.which(tool)
        if path is None:
            found.append(Finding(tool, "not on PATH (needed only to build)"))
            continue
        out = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
        release = next((line for line in out if "release" in line), out[0] if out else "")
        found.append(Finding(tool, release.strip()))
    return found


def _addresses() -> Finding:
    """Whether a tensor that a budget evicts keeps its address (docs/budget.md)."""
    return Finding("evicted addresses", reef.addresses_here())


def _training_step() -> Finding:
    """Trains one step and holds the ledger against the sums that can be done by hand."""
    ledger = reef.Ledger()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ledger.watch(model)
    ledger.watch(optimizer)
    model(torch.randn(16, 64)).pow(2).mean().backward()
    optimizer.step()
    parameters = sum(p.nbytes for p in model.parameters())
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    live = ledger.live()
    wrong = [
        f"{name} {live[name]} B, expected {expected} B"
        for name, expected in (("parameter", parameters), ("gradient", parameters), ("optimizer state", state))
        if live[name] != expected
    ]
    if wrong:
        return Finding("training step", "; ".join(wrong), False, "please report this with the output above")
    return Finding("training step", f"ledger agrees: {parameters} B of parameters, {state} B of optimizer state")


def run(as_json: bool = False) -> int:
    """Prints the findings; the exit code says whether all is well."""
    findings = [*_versions(), *_cuda(), *_tools(), _addresses()]
    try:
        findings.append(_training_step())
    except RuntimeError as error:
        findings.append(Finding("training step", f"failed: {error}", False, "please report this with the output above"))
    healthy = all(finding.ok for finding in findings)
    if as_json:
        print(json.dumps({"ok": healthy, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{'ok ' if finding.ok else 'BAD'} {finding.what:<20} {finding.value}")
            if finding.advice:
                print(f"    {'':<20} -> {finding.advice}")
        print("reef doctor: all is well" if healthy else "reef doctor: something does not match, see above")
    return 0 if healthy else 1
