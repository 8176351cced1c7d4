#!/usr/bin/env python3
"""pytest, forked from the process that has imported torch and reef if tests/run.py has started one."""

import os
import sys

import preloaded


def main() -> int:
    if "torch" in sys.modules:  # forked already
        import pytest
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        sys.path[0] = os.getcwd()  # as python -m pytest has it
        return pytest.main(sys.argv[1:])
    if not preloaded.shared_address():
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
    program = preloaded.start([os.path.abspath(__file__), *sys.argv[1:]], dict(os.environ), sys.stdout)
    code = program.wait()
    if code < 0:
        print(f"ended by signal {-code}", flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
