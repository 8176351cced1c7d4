"""Runs a test program that was compiled with a fault. One of its tests must fail; a crash does not count."""

import subprocess
import sys

run = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=False)
failed = [line for line in run.stdout.splitlines() if line.startswith("[  FAILED  ]")]
if run.returncode != 1 or not failed:
    sys.exit(f"{sys.argv[1]} has not found the fault: it exits with {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
print("found:", failed[0])
