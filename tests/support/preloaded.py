"""Runs Python programs as processes of their own, forked from one that has imported torch and reef: each import takes
seconds, and several times as long when all ranks of a test do it on two cores.

    process = preloaded.start(["program.py", "argument"], env, stdout=file)

A program finds the interpreter as a fresh one that has these modules, with one OpenMP thread, and ends as any other.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time

MODULES = ("torch", "torch._dynamo", "reef")  # an optimizer of torch imports the second when it is made
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.02
ONE_REQUEST = threading.Lock()
"""From a request to its answer."""


def yield_to_senders() -> None:
    """Schedules this process as SCHED_BATCH. Where ranks share few cores and send small messages, gloo's thread, woken by a
    reply, otherwise preempts the sender, which holds the connection's mutex, and polls until it gets that mutex: a test took
    three times as long, with 2.4 million calls of epoll_wait for 55 thousand reads."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Forked:
    """A program that runs: what is used of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        return self.poll(0)


def kill_group(process: subprocess.Popen | Forked) -> None:
    """Kills the process and all that it started: it leads a process group of its own, or is about to."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@functools.cache
def server() -> socket.socket:
    """The connection to the process that has imported, which is started here and ends when this one does."""
    # Makes this process adopt the orphans among its descendants, so that it can wait for the programs.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                         stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return ours


def start(command: list[str], env: dict[str, str], stdout, cwd: str | None = None) -> Forked:
    """Starts the program `command[0]`, leader of a session of its own. `stdout`, a file, takes its errors, too."""
    request = {"command": command, "env": env, "cwd": cwd or os.getcwd()}
    with ONE_REQUEST:
        socket.send_fds(server(), [json.dumps(request).encode()], [stdout.fileno()])
        pid = server().recv(32)
    if not pid:
        raise RuntimeError(f"the process that imports {', '.join(MODULES)} ahead has ended; see what it wrote above")
    return Forked(int(pid))


def run(command: list[str], env: dict[str, str], stdout, cwd: str, timeout_seconds: float) -> int:
    """Runs the program to its end and returns its exit code. Kills it after `timeout_seconds`: subprocess.TimeoutExpired."""
    process = start(command, env, stdout, cwd)
    deadline = time.monotonic() + timeout_seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            kill_group(process)
            process.wait()
            raise subprocess.TimeoutExpired(command, timeout_seconds)
        time.sleep(POLL_SECONDS)
    return process.returncode


def serve(connection: socket.socket) -> dict:
    """Forks a process for each request. Returns the request, and only in the forked process."""
    for module in MODULES:
        __import__(module)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a module that is imported ahead has started a thread, which no forked process would have")
    while True:
        message, (*files,), _, _ = socket.recv_fds(connection, 1 << 20, 1)
        if not message:
            os._exit(0)
        from_between, to_us = os.pipe()
        between = os.fork()
        if between == 0:
            program = os.fork()
            if program != 0:
                os.write(to_us, str(program).encode())
                os._exit(0)
            os.close(from_between)
            os.close(to_us)
            os.setsid()
            yield_to_senders()
            os.dup2(files[0], 1)
            os.dup2(files[0], 2)
            os.close(files[0])
            connection.close()
            return json.loads(message)
        os.waitpid(between, 0)  # its parent has ended, so the requesting process has adopted the program
        connection.send(os.read(from_between, 32))
        for file in (from_between, to_us, files[0]):
            os.close(file)


if __name__ == "__main__":
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = asked["command"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
