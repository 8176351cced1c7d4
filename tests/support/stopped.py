"""A rank that stops for a while, with its connections open, and how soon the others take it for silent."""

import os
import signal
import subprocess

HEARTBEAT_SECONDS = 10.0
"""Of groups with a rank that stops. A machine that is slow and busy delays the signs of life of the others by seconds."""
STOPPED_SECONDS = 3 * HEARTBEAT_SECONDS
"""For how long a rank stops. The others have noticed by then."""


def stop(then: str = f"sleep {STOPPED_SECONDS}; kill -CONT") -> None:
    """Stops this process until a shell has run `then`, which ends with a command that takes the process's number."""
    subprocess.Popen(["sh", "-c", f"{then} {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
