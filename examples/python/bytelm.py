"""bytelm: trains a GPT on text, byte by byte, and shows where its memory goes.

The same program as examples/cpp/bytelm.cpp: for the same options it draws the same batches from the same text,
begins with the same parameters and, on the CPU with --optimizer sgd or any --state, computes the same losses bit for bit.

An ordinary PyTorch program. What Reef adds to it: a ledger that watches the model and the optimizer, with --budget and
--recompute-within memory that suffices, and, when several ranks were started (torchrun, mpirun, srun), a process group
among which reef.shard divides as much as --stage says.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys

import reef
import torch
from bytelm_checkpoint import Run, load_checkpoint, require_writable, save_checkpoint, write_whole_file
from bytelm_corpus import load_corpus, windows_at
from bytelm_model import ByteGPT, bits_per_byte, next_byte_loss, printable, sample
from bytelm_options import find_device, parse_options
from bytelm_pipeline import Pipelined
from bytelm_report import Report


def make_optimizer(options: argparse.Namespace, parameters) -> torch.optim.Optimizer:
    if options.state:
        if options.optimizer == "sgd":
            return reef.optim.SGD(parameters, lr=options.learning_rate, momentum=0.9, state=options.state)
        rates = dict(lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        return reef.optim.AdamW(parameters, **rates, state=options.state)
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=options.learning_rate, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a tenth."""
    warm_up = max(1, options.steps // 20)
    if step < warm_up:
        return options.learning_rate * (step + 1) / warm_up
    part = (step - warm_up) / (options.steps - warm_up)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * part))


def draw_windows(generator, text: torch.Tensor, options: argparse.Namespace, rank: int, ranks: int) -> torch.Tensor:
    """This rank's windows of the next step. Every rank draws those of all ranks and takes its own, so one generator,
    the same everywhere, is all there is to save."""
    window = options.context + 1
    offsets = torch.randint(text.numel() - window + 1, (options.batch * ranks,), generator=generator)
    return windows_at(text, offsets.narrow(0, options.batch * rank, options.batch), window)


def report_divergence(step: int, named: list[tuple[str, torch.Tensor]]) -> None:
    where = "although all gradients are finite"
    for name, parameter in named:
        if count := reef.count_nonfinite(parameter.grad):
            size = parameter.numel()
            where = f"and the first gradient with values that are not is that of {name} ({count} of {size})"
            break
    raise RuntimeError(f"the loss of step {step} is not finite, {where}: try a smaller --learning-rate")


def save_pictures(timeline: reef.Timeline, options: argparse.Namespace, device: torch.device) -> None:
    chart = timeline.chart(
        str(device), title="Bytes alive during one training step", budget_bytes=options.budget or 0
    )
    write_whole_file(options.chart, chart.encode())
    if options.trace:
        write_whole_file(options.trace, timeline.trace().encode())


def train(options: argparse.Namespace) -> None:
    device = find_device(options.device, reef.resolve_rendezvous().local_rank)
    if not options.budget:
        return train_within(None, options, device)
    # The model is made inside, and gone when the budget ends.
    with reef.budget(options.budget, spill=options.spill, restore=bool(options.save), device=device) as budget:
        train_within(budget, options, device)


def train_within(budget: reef.Budget | None, options: argparse.Namespace, device: torch.device) -> None:
    group = reef.init_process_group()
    rank, ranks = group.rank(), group.size()
    leads = rank == 0  # and so speaks and writes
    if leads:
        for path in (options.save, None if options.no_ledger else options.chart, options.trace, options.summary):
            if path:
                require_writable(path)
    if options.threads:
        torch.set_num_threads(options.threads)

    ledger = None if options.no_ledger else reef.Ledger()  # of a CUDA device it counts what is allocated from now on
    torch.manual_seed(options.seed)
    batches = torch.Generator().manual_seed(options.seed)
    model = ByteGPT(options).to(device)
    count = sum(parameter.numel() for parameter in model.parameters())
    order = [name for name, _ in model.named_parameters()]
    training, validation, description = load_corpus(options.data, options.context + 1)
    compression = reef.Compression(options.compression, density=options.density)
    pipelined = sharded = None
    if options.pipeline:
        like = torch.arange(options.batch // options.pipeline)
        pipelined = Pipelined(model, options, group, windows_at(training, like, options.context + 1).to(device))
        model = None  # the stages of other ranks are not needed here
    elif ranks > 1:
        sharded = reef.shard(model, group, stage=options.stage, compression=compression)
    divided = pipelined or sharded
    parameters = divided.parameters() if divided else list(model.parameters())
    names = divided.names() if divided else order
    if options.recompute_within:
        model.recompute_within(options.recompute_within, group if ranks > 1 else None)
    optimizer = make_optimizer(options, parameters)
    run = Run(model, optimizer, batches, divided)
    first_step = load_checkpoint(options.resume, options, run) if options.resume else 0

    if ledger:
        for module in pipelined.modules() if pipelined else [model]:
            ledger.watch(module)
        ledger.watch(optimizer)

    # Of the ranks that train on windows of their own.
    share, shares = (rank % options.replicas, options.replicas) if pipelined else (rank, ranks)
    report = Report(options, rank, shares, first_step)

    validated = 0.0

    def validate() -> str:  # on all ranks: parameters that are divided come together on all of them
        nonlocal validated
        worth = pipelined.bits_per_byte if pipelined else functools.partial(bits_per_byte, model)
        validated = worth(validation, options, device)
        return f"validation: {validated:.4f} bits per byte"

    report.say(f"text: {description}")
    report.say(f"model: {count} parameters on {device}" + (f", {ranks} ranks" if ranks > 1 else ""))
    if pipelined and pipelined.pipeline.plan:
        report.say(pipelined.pipeline.plan.rstrip())
    report.say(f"step {first_step}/{options.steps}  {validate()}")

    # The picture is of the third step: by then gradients and optimizer states are where they stay.
    pictured_step = min(first_step + 3, options.steps) if ledger and leads else -1
    for step in range(first_step + 1, options.steps + 1):
        report.step_begins()
        if step == pictured_step:
            ledger.start_timeline()

        for parameters_and_options in optimizer.param_groups:
            parameters_and_options["lr"] = learning_rate(step - 1, options)
        windows = draw_windows(batches, training, options, share, shares).to(device)
        optimizer.zero_grad()
        if pipelined:
            loss = pipelined.step(windows)
        else:
            loss = next_byte_loss(model, windows)
            loss.backward()
            if ranks > 1:
                reef.all_reduce([loss.detach()], group, reduction="mean")
        nats = loss.item()
        if not math.isfinite(nats):
            report_divergence(step, list(zip(names, parameters, strict=True)))
        if pipelined:
            pipelined.pipeline.clip_grad_norm_(1.0)
        else:
            reef.clip_grad_norm_(parameters, 1.0, group)
        optimizer.step()

        report.step_ends(step, nats, sum(ledger.live(device).values()) if ledger else None)
        if step == pictured_step:
            save_pictures(ledger.stop_timeline(), options, device)
        if step == options.steps:
            continue
        if step % options.eval_every == 0:
            report.say(f"step {step}/{options.steps}  {validate()}, {report.progress()}")
        if options.save_every and step % options.save_every == 0:
            save_checkpoint(options.save, options, run, step)

    whole = pipelined.full_state_dict() if pipelined else dict(model.named_parameters())
    report.log.finish(whole[name] for name in order)
    report.close_bar()
    report.say(validate())
    if model and model.recomputation:
        report.say(f"blocks: {model.recomputation}")
    if budget:
        report.say(budget.report())
    if options.summary and leads:
        peak = budget.peak_bytes if budget else ledger.peak(device).total if ledger else 0
        summary = dict(steps=options.steps, validation_bits_per_byte=validated)
        summary |= dict(tokens_per_second=report.tokens_per_second(), peak_bytes=peak)
        summary |= dict(optimizer_state_bytes=ledger.live(device)["optimizer state"] if ledger else 0)
        write_whole_file(options.summary, (json.dumps(summary) + "\n").encode())
    if budget and options.save:
        budget.stop()  # a checkpoint is read off memory
    if options.save:
        save_checkpoint(options.save, options, run, max(first_step, options.steps))
    if options.sample:
        data = pipelined.sample(options, device) if pipelined else sample(model, options, device)
        report.say("sample:" + printable(data))
    if ledger:
        report.say(ledger.table())
    if pictured_step > first_step:
        report.say(f"memory of step {pictured_step}: {options.chart}")


def main(arguments: list[str] | None = None) -> int:
    speaker = "bytelm.py: "
    try:
        place = reef.resolve_rendezvous()
        if place.world_size > 1:
            speaker += f"rank {place.rank}: "
        train(parse_options(arguments))
    except ValueError as error:
        print(speaker + str(error).split("\n")[0], file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(speaker + str(error).split("\n")[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
