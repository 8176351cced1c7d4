"""Runs a program that was built with ThreadSanitizer, whose runtime (GCC before 14) does not start where the kernel
randomizes addresses by more bits than it knows: then without randomization, and where that is forbidden not at all."""

import platform
import shutil
import subprocess
import sys

SKIPPED = 77
DOES_NOT_START = "unexpected memory mapping"


def run(command: list[str]) -> tuple[int, bool]:
    """Its exit code, and whether it started."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    return done.returncode, DOES_NOT_START not in done.stderr


def main(command: list[str]) -> int:
    code, started = run(command)
    setarch = shutil.which("setarch")
    if not started and setarch:
        code, started = run([setarch, platform.machine(), "-R", *command])
        started = started and code not in (126, 127)
    if not started:
        print("skipped: ThreadSanitizer does not start here (sysctl vm.mmap_rnd_bits is more than 28)")
        return SKIPPED
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
