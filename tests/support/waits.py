"""How long ranks wait where a wait is what a test is about, and a rank that stops for a while, with its connections open."""

import os
import signal
import subprocess

SHORT_SECONDS = 20
"""A timeout that a test lets expire. All ranks have come up by then, on a slow and busy machine, too."""
HEARTBEAT_SECONDS = 10
"""The heartbeat of groups in which a rank stops. A machine that is slow and busy delays signs of life by seconds."""
STOPPED_SECONDS = 3 * HEARTBEAT_SECONDS
"""For how long a rank stops. The others have noticed by then."""


def stop(then: str = f"sleep {STOPPED_SECONDS}; kill -CONT") -> None:
    """Stops this process until a shell has run `then`, which ends with a command that takes the process's number."""
    subprocess.Popen(["sh", "-c", f"{then} {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
