"""What an exchange of gradients takes by each method against the bandwidth of the link, by price_exchange(): 25 million float32,
8 ranks, with the work that two ranks measure here. The link is on paper, so nothing but that work is of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, astuple

ELEMENTS, SHAPE, RANKS = 25_000_000, (5000, 5000), 8
LATENCY_SECONDS, MESSAGE_SECONDS = 0.1e-3, 0.03e-3
OPTIONS = {"density": 0.001, "bits": 8, "rank": 4}
MBITS = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
IN_TABLE = (100, 1_000, 10_000)
CHART = f"Seconds of an exchange against bandwidth, {RANKS} ranks"


def measure() -> None:
    """One of two ranks; the first prints what both have measured."""
    import reef
    import torch

    torch.set_num_threads(1)
    group = reef.init_process_group()
    work = reef.measure_exchange_work(group, density=OPTIONS["density"])
    if group.rank() == 0:
        print(json.dumps(asdict(work)), flush=True)


def measured() -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [sys.executable, __file__, "measure"]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen(line, env=os.environ | place | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank has failed")
    return json.loads(outputs[0])


def main() -> None:
    import reef

    work = reef.ExchangeWork(**measured())
    of_work = "work of an element: " + ", ".join(f"{seconds * 1e9:.2g}" for seconds in astuple(work)) + " ns"
    for mbits in MBITS:
        link = reef.Link(latency_seconds=LATENCY_SECONDS, message_seconds=MESSAGE_SECONDS, bytes_per_second=mbits * 1e6 / 8)
        prices = reef.price_exchange(link, ELEMENTS, ranks=RANKS, work=work, shapes=[SHAPE], **OPTIONS)
        for price in prices.methods:
            print(json.dumps({"chart": CHART, "series": price.method, "x_name": "Mbit/s", "x": mbits, "y_name": "seconds",
                              "y": price.seconds, "scale": "log"}))  # fmt: skip
            if mbits in IN_TABLE:
                context = f"{price.sent_bytes / 1e6:.4g} MB sent, {price.work_seconds:.3g} s of it work; {price.gives}; {of_work}"
                print(json.dumps({"name": f"price/{ELEMENTS // 1_000_000} M, {RANKS} ranks, {mbits} Mbit/s/{price.method}",
                                  "value": price.seconds, "unit": "s", "context": context}))  # fmt: skip


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["measure"] else main()
