"""How long it takes to choose a schedule for a chain, and what it costs: reef.plan_chain, the textbook's dynamic program in numpy
(Beaumont et al., 1911.13214), and rockmate's C solver, if it is installed. Seeded heterogeneous chains, like those of a ResNet,
half of what storing everything takes in 500 slots."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import time
import types

import numpy as np

LENGTHS, SLOTS, SHARE, ROUNDS = (20, 50, 100, 200, 339), 500, 0.5, 3
MORE_SLOTS = (125, 250, 500, 1000, 2000, 4000)
"""For the cost against slots, of 100 stages."""
ROCKMATE = importlib.util.find_spec("rockmate")
TEXTBOOK_UP_TO = 200
"""Stages; it takes ten seconds there."""


def make_chain(length: int, slots: int, seed: int = 1) -> dict:
    """Outputs shrink by steps along the chain, tapes are 2 to 6 of them; sizes in slots."""
    draw = random.Random(seed)
    outputs = [2.0 ** -(4 * i // length) * draw.uniform(0.8, 1.2) for i in range(length + 1)]
    tapes = [outputs[i + 1] + outputs[i] * draw.uniform(1, 5) for i in range(length)]
    forward = [draw.uniform(0.5, 1.5) for _ in range(length)]
    backward = [f * draw.uniform(1.6, 2.4) for f in forward]
    slot = (outputs[0] + sum(tapes)) * SHARE / slots
    rounded = lambda sizes: [max(1, math.ceil(size / slot)) for size in sizes]  # noqa: E731
    return {"a": rounded(outputs), "abar": rounded(tapes), "uf": forward, "ub": backward, "budget": slots}


def textbook(chain: dict) -> float:
    """C[s, t][m], the least time of stages s to t with m slots besides the input of s. The loss is one more stage, of no cost, and
    the last output is left out of the budget, as rockmate has it."""
    length, most = len(chain["uf"]), chain["budget"] - chain["a"][0]
    a, abar = chain["a"][:length] + [0, 0], chain["abar"] + [0]
    uf, ub = chain["uf"] + [0.0], chain["ub"] + [0.0]
    slots, until = np.arange(most + 1), np.concatenate(([0], np.cumsum(uf)))
    cost = np.full((length + 1, length + 1, most + 1), np.inf)
    for s in range(length + 1):
        cost[s, s] = np.where(slots >= abar[s] + max(a[s], a[s + 1]), uf[s] + ub[s], np.inf)
    for distance in range(1, length + 1):
        for s in range(length + 1 - distance):
            t = s + distance
            best = np.full(most + 1, np.inf)
            for k in range(s + 1, t + 1):
                if a[k] <= most:
                    kept = until[k] - until[s] + cost[k, t, : most + 1 - a[k]] + cost[s, k - 1, a[k] :]
                    np.minimum(best[a[k] :], kept, out=best[a[k] :])
            taped = abar[s] + max(a[s], a[s + 1])
            if taped <= most:
                np.minimum(best[taped:], uf[s] + ub[s] + cost[s + 1, t, taped - abar[s] : most + 1 - abar[s]], out=best[taped:])
            need = a[t + 1] + max([a[s + 1]] + [a[j] + a[j + 1] for j in range(s + 1, t)])
            best[: min(most + 1, need)] = np.inf
            cost[s, t] = best
    return float(cost[0, length, most])


def rockmate(chain: dict) -> float | None:
    """Its C solver alone: the package's own import needs more than its wheel brings."""
    if ROCKMATE is None:
        return None
    name = "rockmate.solvers.rk_rotor"
    for depth in range(1, 4):
        part = ".".join(name.split(".")[:depth])
        if part not in sys.modules:
            sys.modules[part] = types.ModuleType(part)
            sys.modules[part].__path__ = [os.path.join(ROCKMATE.submodule_search_locations[0], *part.split(".")[1:])]
    solver = importlib.import_module(name + ".csolver")
    length, given = len(chain["uf"]), types.SimpleNamespace()
    given.ln = length
    given.fw, given.bw = [[v] for v in chain["uf"]] + [[0.0]], [[v] for v in chain["ub"]] + [[0.0]]
    given.cw, given.cbw = chain["a"][:length] + [0, 0], [[0]] + [[v] for v in chain["abar"]] + [[0]]
    given.fwd_tmp, given.bwd_tmp = [[0]] * (length + 1), [[0]] * (length + 1)
    given.ff_fwd_tmp, given.ff_fw, given.nb_sol = [0] * (length + 1), chain["uf"] + [0.0], [1] * (length + 1)
    most = chain["budget"] - chain["a"][0]
    return solver.RkTable(given, most).get_opt(most)


def profile_of(chain: dict):
    """The same in reef's terms: the gradient of a stage's output makes room for that of its input."""
    import reef

    length = len(chain["uf"])
    a = chain["a"][:length] + [0]
    stages = []
    for i in range(length):
        output, tape = a[i + 1], chain["abar"][i]
        stages.append(reef.StageProfile(
            name=str(i), output_bytes=output, tape_bytes=tape, tape_has_input=True, tape_has_output=True, forward_bytes=output, taped_bytes=tape,
            retape_bytes=tape, backward_bytes=max(0, a[i] - output), gradient_bytes=0, forward_seconds=chain["uf"][i],
            retape_seconds=chain["uf"][i], backward_seconds=chain["ub"][i]))  # fmt: skip
    return reef.ChainProfile(tuple(stages)), chain["budget"] - chain["a"][0]


def timed(work) -> tuple[float, object]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def row(name: str, seconds: float, context: str) -> None:
    print(json.dumps({"name": name, "value": seconds, "unit": "s", "context": context}), flush=True)


def point(against: str, series: str, x: int, seconds: float) -> None:
    print(json.dumps({"chart": f"Time to choose a schedule, against {against}", "series": series, "x_name": against, "x": x,
                      "y_name": "s", "y": seconds, "scale": "log"}), flush=True)  # fmt: skip


def main() -> None:
    import reef

    for length in LENGTHS:
        chain = make_chain(length, SLOTS)
        profile, budget = profile_of(chain)
        ours, theirs = [], []
        for _ in range(ROUNDS):
            seconds, schedule = timed(lambda p=profile, b=budget: reef.plan_chain(p, b, slots=SLOTS))
            ours.append(seconds)
            if length <= TEXTBOOK_UP_TO:
                seconds, cost = timed(lambda c=chain: rockmate(c))
                theirs.append((seconds, cost))
        cost = schedule.cost(profile).seconds
        once = sum(chain["uf"]) + sum(chain["ub"])
        how = f"median of {ROUNDS} rounds; cost {cost:.4f}, {100 * (cost / once - 1):.1f} % over none recomputed"
        if length <= TEXTBOOK_UP_TO:
            seconds, wanted = timed(lambda c=chain: textbook(c))
            row(f"{length} stages/textbook in numpy", seconds, f"cost {wanted:.4f}")
            point("stages, 500 slots", "textbook in numpy", length, seconds)
        middle = statistics.median(ours)
        if theirs and theirs[0][1] is not None:
            peer = statistics.median(seconds for seconds, _ in theirs)
            row(f"{length} stages/rockmate's C solver", peer, f"median of {ROUNDS} rounds; cost {theirs[0][1]:.4f}")
            how += f"; {peer / middle:.1f} times faster than rockmate's"
            point("stages, 500 slots", "rockmate's C solver", length, peer)
        row(f"{length} stages/reef", middle, how)
        point("stages, 500 slots", "reef", length, middle)
    for slots in MORE_SLOTS:
        profile, budget = profile_of(make_chain(100, slots))
        seconds, schedule = timed(lambda p=profile, b=budget, n=slots: reef.plan_chain(p, b, slots=n))
        row(f"100 stages, {slots} slots/reef", seconds, f"cost {schedule.cost(profile).seconds:.4f}")
        point("slots, 100 stages", "reef", slots, seconds)


if __name__ == "__main__":
    main()
