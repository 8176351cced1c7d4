"""What the command line of bytelm.py says."""

from __future__ import annotations

import argparse
import math

import reef
import torch


STAGES = ("replicate", "optimizer", "gradients", "parameters")


class OneSentenceParser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(f"{message}; bytelm.py --help lists the options")


def between(lowest: int, highest: int):
    def number(text: str) -> int:
        if not lowest <= (value := int(text)) <= highest:
            raise argparse.ArgumentTypeError(f"must be from {lowest} to {highest}, not {text}")
        return value

    return number


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    description = "Trains a byte-level GPT on text and shows where its memory goes."
    parser = OneSentenceParser(prog="bytelm.py", description=description, allow_abbrev=False)
    add = parser.add_argument
    positive, not_negative = between(1, 2**31 - 1), between(0, 2**63 - 1)
    add("--data", nargs="+", default=[], metavar="PATH", help="files and folders; default: Python's standard library")
    add("--width", type=positive, default=128, help="features of a token; a multiple of --heads")
    add("--depth", type=positive, default=4, help="attention blocks")
    add("--heads", type=positive, default=4, help="attention heads of a block")
    add("--context", type=positive, default=128, help="bytes the model sees at once")
    add("--batch", type=positive, default=8, help="windows in a step, on each rank")
    add("--steps", type=positive, default=1200, help="training steps")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    formats = reef.optim.STATES
    add("--state", choices=formats, help="step by reef.optim with states kept so; by default torch.optim steps")
    add("--stage", choices=(*STAGES, *"0123"), default="replicate", help="what ranks divide: nothing, states, gradients, parameters")
    add("--compression", metavar="METHOD", default="none", help="how gradients travel between ranks: none, bfloat16, gtopk, powersgd, ...")
    add("--density", type=float, metavar="SHARE", help="of a gradient's elements, which are sent by topk and gtopk")
    add("--learning-rate", type=float, default=3e-3, help="largest learning rate")
    add("--seed", type=not_negative, default=0, help="of the parameters, the batches and the sample")
    add("--threads", type=positive, help="threads of an operator; by default PyTorch decides")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--eval-every", type=positive, default=200, help="steps between two validations")
    add("--sample", type=not_negative, default=400, help="bytes to write when trained; 0 for none")
    add("--save", metavar="FILE", help="keep a checkpoint here, written at the end")
    add("--save-every", type=positive, help="and every so many steps")
    add("--resume", metavar="FILE", help="go on from this checkpoint")
    add("--chart", metavar="FILE", help="SVG of the bytes alive during one step; default: bytelm-memory.svg")
    add("--trace", metavar="FILE", help="the same as a Chrome trace (JSON)")
    add("--losses", metavar="FILE", help="the loss of each step as a JSON line (FILE.rank1 and so on for the other ranks)")
    add("--summary", metavar="FILE", help="what the run came to: loss, speed and peak, as JSON")
    add("--budget", metavar="SIZE", help="train inside so many bytes (12MiB), bit for bit the same")
    add("--spill", metavar="FOLDER", help="what leaves goes to a file there, by default to host memory")
    add("--recompute-within", metavar="SIZE", help="blocks keep so many bytes for backward, and compute the rest once more")
    add("--pipeline", type=between(1, 128), default=0, metavar="COUNT", help="cut the model over the ranks, and a step into so many micro-batches; divides --batch")
    add("--schedule", metavar="NAME", help="of the pipeline: 1f1b, zbv, ...; by default planned for the ranks and links that there are")
    add("--replicas", type=positive, default=1, help="of the pipeline, each with a --batch of its own")
    add("--no-ledger", action="store_true", help="do not count memory, to measure what counting costs")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} cannot be divided among --heads {options.heads}: make it a multiple")
    if not (math.isfinite(options.learning_rate) and options.learning_rate > 0):
        parser.error("--learning-rate must be a number above 0")
    if options.save_every and not options.save:
        parser.error("--save-every needs --save FILE to say where the checkpoint goes")
    if options.recompute_within:
        options.recompute_within = reef.parse_bytes(options.recompute_within)
    if options.budget:
        options.budget = reef.parse_bytes(options.budget)
    elif options.spill:
        parser.error("--spill says where a --budget's pages go: give both")
    if options.budget and options.save_every:
        parser.error("--save-every reads all parameters at once, which a --budget need not hold: leave one out")
    if not options.pipeline and (options.schedule or options.replicas > 1):
        parser.error("--schedule and --replicas are of a pipeline: give --pipeline COUNT, too")
    if options.pipeline and options.batch % options.pipeline:
        parser.error(f"--batch {options.batch} cannot be cut into --pipeline {options.pipeline} micro-batches: make it a multiple")
    if options.pipeline and options.recompute_within:
        parser.error("--recompute-within plans all blocks on one rank: leave it out with --pipeline")
    if options.pipeline and options.compression != "none":
        parser.error("--compression is not for the gradients of a --pipeline: leave one out")
    if options.no_ledger and (options.chart or options.trace):
        parser.error("--chart and --trace show what the ledger counts: leave out --no-ledger")
    options.stage = STAGES[int(options.stage)] if options.stage.isdecimal() else options.stage
    options.chart = options.chart or "bytelm-memory.svg"
    return options


def find_device(text: str, local_rank: int) -> torch.device:
    name, _, number = text.partition(":")
    if text == "cpu":
        return torch.device("cpu")
    if name != "cuda" or (text != "cuda" and not number.isdecimal()):
        raise ValueError(f"--device '{text}' is not known: use cpu, cuda or cuda:N")
    index = int(number or local_rank)
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"--device {text} needs CUDA device {index}, but {count} are usable here: "
            "use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)
