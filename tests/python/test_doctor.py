import json
import subprocess
import sys

from ranks import HANG_SECONDS

import reef


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "reef", *arguments], capture_output=True, text=True, timeout=HANG_SECONDS)


def test_doctor_finds_this_build_healthy():
    out = run("doctor")
    assert out.returncode == 0, out.stdout + out.stderr
    assert "ledger agrees" in out.stdout
    assert "all is well" in out.stdout


def test_doctor_as_json():
    report = json.loads(run("doctor", "--json").stdout)
    assert report["ok"]
    facts = {finding["what"]: finding["value"] for finding in report["findings"]}
    assert facts["built for torch"] == reef.build_info().built_torch


def test_a_binary_that_does_not_fit_is_said_and_fails(monkeypatch, capsys):
    import dataclasses

    from reef import doctor

    other = dataclasses.replace(reef.build_info(), built_torch="2.10.0")
    monkeypatch.setattr(reef, "build_info", lambda: other)
    assert doctor.run() == 1
    assert "build Reef against torch" in capsys.readouterr().out


def test_version_and_usage():
    assert run("--version").stdout.strip() == reef.__version__
    assert run().returncode == 2


def test_a_build_tree_has_no_cmake_package_and_says_so():
    out = run("--cmake-dir")
    if out.returncode != 0:
        assert "pip install" in out.stderr
    else:
        assert out.stdout.strip().endswith("cmake/Reef")
