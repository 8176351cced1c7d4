"""Every synchronous schedule over ranks whose stages sleep (paced_pipeline.py), against what the simulation says that it takes.
`pipeline_simulation_bench.py 2 3` runs those of 2 and 3 ranks alone."""

from __future__ import annotations

import sys

from paced_pipeline import Job
from pipeline_bench import can_make_hosts, hosts, report, run

MICRO_BATCHES = 16
FORWARD_SECONDS = {2: 0.040, 3: 0.040, 4: 0.040, 5: 0.080, 6: 0.080, 7: 0.080, 8: 0.080}
"""Of a rank, by the number of ranks. More ranks than cores wait for each other when they wake, which is to be small beside it."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "breadth_first", "zero_bubble", "interleaved_zero_bubble", "zbv", "v_half", "v_min",
             "chimera", "dualpipe", "dualpipev", "greedy", "1f1b turns", "zero_bubble turns")  # fmt: skip


def main(numbers_of_ranks: list[int]) -> None:
    for ranks in numbers_of_ranks:
        with hosts(ranks, 0) as names:
            for schedule in SCHEDULES:
                if schedule in ("chimera", "dualpipe") and ranks % 2:
                    continue
                job = Job("reef", schedule, ranks, MICRO_BATCHES, FORWARD_SECONDS[ranks], steps=3)
                report(f"{ranks} ranks, {MICRO_BATCHES} micro-batches, {FORWARD_SECONDS[ranks] * 1e3:.0f} ms forward", job, run(job, names))


if __name__ == "__main__" and can_make_hosts():
    main([int(ranks) for ranks in sys.argv[1:]] or list(FORWARD_SECONDS))
