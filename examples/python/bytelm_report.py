"""What a run tells while it goes: lines, a bar and a log."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib

import reef
from bytelm_checkpoint import cannot_write

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class RunLog:
    """One JSON object a line, with every digit; two runs computed the same if their logs are the same."""

    def __init__(self, path: str | None):
        try:
            self.file = open(path, "w", encoding="utf-8") if path else None
        except OSError as error:
            raise cannot_write(path, error.strerror) from error

    def write(self, **values) -> None:
        if self.file:
            print(json.dumps(values), file=self.file, flush=True)

    def finish(self, parameters) -> None:
        if self.file:
            crc = 0
            for parameter in parameters:
                crc = zlib.crc32(parameter.detach().cpu().clone().numpy(), crc)
            self.write(parameters_crc32=crc)


class Report:
    """Lines on stdout and a bar on stderr (both of rank 0 only, the bar only if stderr is a terminal), and the log of
    this rank."""

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int, first_step: int):
        self.speaks = rank == 0
        self.first_step, self.step, self.steps = first_step, first_step, options.steps
        self.tokens_per_step = options.batch * options.context * ranks
        self.log = RunLog(options.losses if self.speaks or not options.losses else f"{options.losses}.rank{rank}")
        self.seconds = 0.0  # in steps
        self.bar = None
        if tqdm and self.speaks and sys.stderr.isatty():
            self.bar = tqdm(total=options.steps, initial=first_step, unit="step", leave=False)

    def say(self, text: str) -> None:
        if self.speaks:
            (tqdm.write if self.bar else print)(text)
            sys.stdout.flush()

    def step_begins(self) -> None:
        self.begin = time.perf_counter()

    def step_ends(self, step: int, nats: float, bytes_alive: int | None) -> None:
        self.seconds += time.perf_counter() - self.begin
        self.step, self.bits_per_byte, self.bytes_alive = step, nats / math.log(2), bytes_alive
        self.log.write(step=step, loss=nats)
        if self.bar:
            self.bar.set_postfix_str(self.progress(), refresh=False)
            self.bar.update()

    def tokens_per_second(self) -> float:
        return self.tokens_per_step * (self.step - self.first_step) / self.seconds if self.seconds else 0.0

    def progress(self) -> str:
        seconds_per_step = self.seconds / (self.step - self.first_step)
        left = round(seconds_per_step * (self.steps - self.step))
        alive = "" if self.bytes_alive is None else f", {reef.format_bytes(self.bytes_alive)} alive"
        return (
            f"loss {self.bits_per_byte:.3f} bits/byte, {self.tokens_per_step / seconds_per_step:.0f} tokens/s{alive}, "
            f"{left // 60}:{left % 60:02} left"
        )

    def close_bar(self) -> None:
        if self.bar:
            self.bar.close()
        self.bar = None
