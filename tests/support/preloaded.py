"""Runs programs as processes of their own, forked from one that has done what all of them begin with: a Python program
from an interpreter that has imported torch and reef (seconds, and several times as long when all ranks of a test do it on
two cores), a program of this build in C++ from itself, where main() begins (preloaded.cpp).

    process = preloaded.start(["program.py", "argument"], env, file)

A program finds the process as a fresh one, with one OpenMP thread, and ends as any other. It is killed, with what it has
started, if the process that has asked for it ends before it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap

FROZEN_MODULES = ("torch", "reef")  # imported before gc.freeze(), so no collection of a forked program visits their objects
MODULES = ("torch._dynamo",)  # imported after it: frozen, its extensions would report leaks when a program ends
ADDRESS = "REEF_PRELOADED"
"""The environment variable with the address of a server that all tests share. tests/run.py starts that server."""
DEVICE_ADDRESS = "REEF_PRELOADED_ON_DEVICE"
"""The same for tests on played devices, whose libraries their server has preloaded."""
ENDS_AT_ONCE = "REEF_ENDS_AT_ONCE"
"""The environment variable with which a forked program in Python that comes to its end does so by end_at_once()."""
FILES = "REEF_PRELOADED_FILES"
"""The environment variable with two descriptors that a server inherits: the socket on which it listens, and the end of a
pipe that it reads. The server ends when the other end is closed."""
BUILD = os.environ.get("REEF_BUILD_DIR", "")
LIBRARY = os.path.join(BUILD, "tests", "libreef_preloaded.so")


def can_fork(program: str) -> bool:
    """Whether start() can: a program in Python, or one in C++ of this build."""
    if program.endswith(".py"):
        return True
    return os.path.exists(LIBRARY) and os.path.abspath(program).startswith(os.path.abspath(BUILD) + os.sep)


def shared_address(env: os._Environ | dict[str, str] = os.environ) -> str | None:
    """Returns the address of the server that tests with this environment share, if there is one."""
    return env.get(DEVICE_ADDRESS if "libplayed_cuda" in env.get("LD_PRELOAD", "") else ADDRESS)


def yield_to_senders() -> None:
    """Schedules this process as SCHED_BATCH. Where ranks share few cores and send small messages, gloo's thread, woken by a
    reply, otherwise preempts the sender, which holds the connection's mutex, and polls until it gets that mutex: a test took
    three times as long, with 2.4 million calls of epoll_wait for 55 thousand reads."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Forked:
    """A program that runs, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.returncode: int | None = None
        self.pid = self.receive()

    def receive(self) -> int:
        answer = self.connection.recv(32)
        if not answer:
            raise RuntimeError("the process that programs are forked from has ended; see what it wrote above")
        return int(answer)

    def poll(self, timeout_seconds: float | None = 0) -> int | None:
        if self.returncode is None and select.select([self.connection], [], [], timeout_seconds)[0]:
            self.returncode = self.receive()
            self.connection.close()
        return self.returncode

    def wait(self) -> int:
        return self.poll(None)


def kill_group(process: subprocess.Popen | Forked) -> None:
    """Kills the process and all that it started: it leads a process group of its own, or is about to."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def start_server(command: list[str], env: dict[str, str]) -> tuple[str, int]:
    """Starts a process that forks programs. Returns its address, and a descriptor: when it is closed, the process ends."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("")  # a name that is free
    listening.listen(64)
    theirs, life = os.pipe()
    with listening:
        files = (listening.fileno(), theirs)
        variables = {FILES: f"{files[0]},{files[1]}", "OMP_NUM_THREADS": "1"}
        subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files, env=env | variables, start_new_session=True)
        os.close(theirs)
        return listening.getsockname()[1:].decode(), life


def start_python_server(interpreter: str, env: dict[str, str]) -> tuple[str, int]:
    """Starts a process that imports torch and reef and forks programs in Python. Returns what start_server() does."""
    return start_server([interpreter, __file__], env)


@functools.cache
def address(program: str) -> str:
    """Returns the address of a server that forks `program`, or programs in Python if `program` is "". Starts one, which ends
    with this process, unless the environment names one for Python."""
    if program:
        before = os.environ.get("LD_PRELOAD")  # a played device
        return start_server([program], os.environ | {"LD_PRELOAD": f"{LIBRARY}:{before}" if before else LIBRARY})[0]
    return shared_address() or start_python_server(sys.executable, dict(os.environ))[0]


def start(command: list[str], env: dict[str, str], stdout, stderr=None, cwd: str | None = None) -> Forked:
    """Starts the program `command[0]`, leader of a session of its own. `stdout`, a file, takes its errors, too, if there
    is no other for them."""
    program = command[0]
    variables = (f"{name}={value}" for name, value in env.items())
    request = "\0".join([cwd or os.getcwd(), str(len(command)), *command, *variables])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + address("" if program.endswith(".py") else program))
    socket.send_fds(connection, [os.fsencode(request)], [stdout.fileno(), (stderr or stdout).fileno()])
    return Forked(connection)


def run(command: list[str], env: dict[str, str], stdout, timeout_seconds: float, stderr=None, cwd: str | None = None) -> int:
    """Runs the program to its end and returns its exit code. Kills it after `timeout_seconds`: subprocess.TimeoutExpired."""
    process = start(command, env, stdout, stderr, cwd)
    if process.poll(timeout_seconds) is None:
        kill_group(process)
        process.wait()
        raise subprocess.TimeoutExpired(command, timeout_seconds)
    return process.returncode


def run_text(program: str, timeout_seconds: float = 900) -> subprocess.CompletedProcess[str]:
    """Runs a program in Python, given as text that may be indented, to its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.py")
        with open(path, "w") as file, open(path + ".out", "w+") as stdout, open(path + ".err", "w+") as stderr:
            file.write(textwrap.dedent(program))
            file.flush()
            code = run([path], dict(os.environ), stdout, timeout_seconds, stderr)
            texts = [output.read() for output in (stdout, stderr) if output.seek(0) == 0]
        return subprocess.CompletedProcess([path], code, *texts)


def end_at_once(code: int = 0) -> None:
    """Ends this process, with what was registered by atexit, but without the rest of the interpreter's end, which takes half a
    second to a second of a core once torch is loaded. For processes of which there are many, and whose end is not tested."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def attend(program: int, connection: socket.socket) -> None:
    """Sends the pid and the exit code of a child. Kills the child and its group if the other end hangs up before."""
    with contextlib.suppress(BrokenPipeError):
        connection.send(str(program).encode())
    ended = os.pidfd_open(program)
    events = select.poll()
    events.register(ended, select.POLLIN)
    events.register(connection, 0)  # hanging up is always reported
    if ended not in dict(events.poll()):
        os.kill(program, signal.SIGKILL)
        os.killpg(program, signal.SIGKILL)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    connection.send(str(exit_code).encode())


def serve(listening: socket.socket, life: int) -> list[str]:
    """Forks a process for each request. Returns its strings, and only in the forked process."""
    for module in FROZEN_MODULES:
        __import__(module)
    gc.freeze()  # a collection writes to every object that it visits, which copies the pages it shares with the server
    for module in MODULES:
        __import__(module)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a module that is imported ahead has started a thread, which no forked process would have")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need not be waited for
    while True:
        if life in select.select([listening, life], [], [])[0]:
            os._exit(0)
        connection = listening.accept()[0]
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if a shell has started us in the background
            listening.close()
            os.close(life)
            program = os.fork()
            if program != 0:
                try:
                    attend(program, connection)
                finally:
                    os._exit(0)
            connection.close()
            os.setsid()
            yield_to_senders()
            for file, place in zip(files, (1, 2), strict=True):
                os.dup2(file, place)
                os.close(file)
            return os.fsdecode(message).split("\0")
        for file in (connection.detach(), *files):
            os.close(file)


if __name__ == "__main__":
    ours, life_file = map(int, os.environ[FILES].split(","))
    folder, count, *words = serve(socket.socket(fileno=ours), life_file)
    os.environ.clear()
    os.environ.update(word.split("=", 1) for word in words[int(count):])
    os.chdir(folder)
    sys.argv = words[:int(count)]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    ends_at_once = os.environ.pop(ENDS_AT_ONCE, "") != ""
    runpy.run_path(sys.argv[0], run_name="__main__")
    if ends_at_once:
        end_at_once()
