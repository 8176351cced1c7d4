"""`python -m reef`: what it says of this build. One test starts an interpreter; the others call what it runs."""

import dataclasses
import json
import subprocess
import sys

from ranks import HANG_SECONDS

import reef
from reef import doctor
from reef.__main__ import main


def test_doctor_finds_this_build_healthy():
    out = subprocess.run([sys.executable, "-m", "reef", "doctor"], capture_output=True, text=True, check=False,
                         timeout=HANG_SECONDS)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "ledger agrees" in out.stdout
    assert "evicted addresses" in out.stdout
    assert "all is well" in out.stdout


def test_doctor_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    facts = {finding["what"]: finding["value"] for finding in report["findings"]}
    assert facts["built for torch"] == reef.build_info().built_torch


def test_a_binary_that_does_not_fit_is_said_and_fails(monkeypatch, capsys):
    other = dataclasses.replace(reef.build_info(), built_torch="2.10.0")
    monkeypatch.setattr(reef, "build_info", lambda: other)
    assert doctor.run() == 1
    assert "build Reef against torch" in capsys.readouterr().out


def test_version_and_usage(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == reef.__version__
    assert main([]) == 2


def test_a_build_tree_has_no_cmake_package_and_says_so(capsys):
    try:
        assert main(["--cmake-dir"]) == 0
    except FileNotFoundError as error:
        assert "pip install" in str(error)
    else:
        assert capsys.readouterr().out.strip().endswith("cmake/Reef")
