"""Ranks on two hosts, played by two network namespaces of this one that a cable joins: loopback does not reach the other,
and neither does a look at its processes. Needs the right to make namespaces."""

import os
import subprocess

import pytest
from ranks import run_ranks
from waits import SHORT_SECONDS

RANK_FAILED, GROUP_FAILED = 10, 11
SERVER_ADDRESS, OTHER_ADDRESS = "10.77.0.1", "10.77.0.2"


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Names of the two namespaces; each has an interface `cable`."""
    names = [f"reef{os.getpid()}a", f"reef{os.getpid()}b"]
    try:
        made = ip("netns", "add", names[0], check=False)
    except FileNotFoundError:
        pytest.skip("the program ip is not installed")
    if made.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (SERVER_ADDRESS, OTHER_ADDRESS), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def run(build_dir, hosts, *arguments, before="true"):
    """Ranks 0 and 1 on the first host, rank 2 on the second, which runs `before` beside it."""
    probe = build_dir / "tests" / "rank_probe"
    command = ["bash", "-c", f'[ $RANK = 2 ] && ({before}) & exec ip netns exec $HOST "$0" "$@"', str(probe),
               *map(str, arguments)]
    result = run_ranks(command, 3, env={"MASTER_ADDR": SERVER_ADDRESS, "MASTER_PORT": "29500"},
                       rank_env={0: {"HOST": hosts[0]}, 1: {"HOST": hosts[0]}, 2: {"HOST": hosts[1]}})
    assert not [rank for rank in result.ranks if rank.stopped_by], result.report()
    return result


def test_they_come_up_over_the_cable(build_dir, hosts):
    assert run(build_dir, hosts, "--interface", "cable").ok


def test_a_host_name_that_others_cannot_reach_is_told_to_all(build_dir, hosts):
    result = run(build_dir, hosts, "--timeout-ms", 1000 * SHORT_SECONDS)
    sentences = {rank.output.splitlines()[-1].partition(": ")[2] for rank in result.ranks}
    assert [rank.exit_code for rank in result.ranks] == [GROUP_FAILED] * 3, result.report()
    assert len(sentences) == 1 and "ProcessGroupOptions::interface" in sentences.pop()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_is_named_on_both(build_dir, hosts, victim):
    result = run(build_dir, hosts, "--interface", "cable", "--kill", f"{victim}:1")
    for rank in result.ranks:
        if rank.rank != victim:
            assert rank.exit_code == RANK_FAILED, result.report()
            assert f"RankFailed {victim}: " in rank.output, result.report()


def test_a_cable_that_is_cut_hangs_no_one(build_dir, hosts):
    cut = f"sleep 10; ip -n {hosts[1]} link set cable down"
    result = run(build_dir, hosts, "--interface", "cable", "--steps", 10_000_000, "--timeout-ms", 1000 * SHORT_SECONDS,
                 "--heartbeat-ms", 60000, before=cut)
    assert [rank.exit_code for rank in result.ranks] == [RANK_FAILED] * 3, result.report()
    assert "all but rank 2 have failed" in result.ranks[0].output
    assert "RankFailed 0: " in result.ranks[2].output and "cannot be reached" in result.ranks[2].output
