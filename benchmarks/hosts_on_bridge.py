"""Hosts that a bridge joins, played by network namespaces: for benchmarks of ranks on slow links."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator


def run_command(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def hosts_on_bridge(count: int, limit: Callable[[int, str, str], None]) -> Iterator[list[str]]:
    """Yields the names of `count` namespaces. Host `number` has the interface `cable` with the address 10.79.0.{number + 1}; its
    other end is `port{number}` of a bridge in a namespace of its own. `limit(number, name, bridge)` may slow the cable down.
    Raises FileNotFoundError or subprocess.CalledProcessError where namespaces cannot be made."""
    bridge = f"reef{os.getpid()}s"
    names = [f"reef{os.getpid()}n{number}" for number in range(count)]
    try:
        run_command("ip", "netns", "add", bridge)
        run_command("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        run_command("ip", "-n", bridge, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            run_command("ip", "netns", "add", name)
            run_command("ip", "link", "add", "cable", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", bridge)
            run_command("ip", "-n", bridge, "link", "set", f"port{number}", "master", "bridge", "up")
            run_command("ip", "-n", name, "addr", "add", f"10.79.0.{number + 1}/24", "dev", "cable")
            run_command("ip", "-n", name, "link", "set", "cable", "up")
            run_command("ip", "-n", name, "link", "set", "lo", "up")
            limit(number, name, bridge)
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
