"""Runs a test program that was compiled with a fault, until one of its tests has failed; a crash does not count."""

import subprocess
import sys

said = []
with subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
    for line in run.stdout:
        said.append(line)
        if line.endswith(": Failure\n"):
            run.kill()
            print("found:", line.strip())
            sys.exit(0)
sys.exit(f"{sys.argv[1]} has not found the fault: it exits with {run.returncode}\n{''.join(said)[-4000:]}")
