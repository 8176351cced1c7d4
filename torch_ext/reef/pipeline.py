"""Models that are cut over ranks, trained and run in micro-batches as a schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed

from . import _library  # noqa: F401  (the operators)
from ._function import number_of
from .bytes import parse_bytes
from .chain import Chain, _places
from .optimizer_states import OptimizerStates
from .pipeline_batches import PipelineBatches, Tensors, batch_tensors, first_stage_input, kind_of, rows_of
from .pipeline_schedule import PipelineSchedule, _ends
from .process_group import _boxed
from .shard_options import shard_options
from .shard_state import is_extra, tensors_of
from .stepped import Stepped

Maker = Callable[[], torch.nn.Module]


class Pipeline(OptimizerStates):
    """A model that is a chain of stages, cut over the ranks of ``group``. ::

        pipeline = reef.Pipeline(model, group, micro_batches=16)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        for batch, target in data:
            loss = pipeline.step(batch, torch.nn.functional.cross_entropy, target)
            optimizer.step()
            optimizer.zero_grad()

    ``stages``: a ``torch.nn.Sequential``, a ``Chain`` of modules, or a list of modules, or of functions that make them: then each rank makes its own
    stages only, so the whole model need not fit on one. A stage is called with the outputs of the one before and returns a
    tensor or a tuple of tensors, of any dtypes. ``schedule`` is a name of ``PIPELINE_SCHEDULES``, for which
    ``chunks_per_rank``, ``hops`` and ``ranks_per_chunk`` are as in ``pipeline_schedule``, or a ``PipelineSchedule``; an asynchronous one is for ``train``.
    ``cuts`` are the first stages of each chunk but the first; by default each chunk has as many stages as the others. Without a
    schedule it is ``"1f1b"``, or what is planned for a sample:

    ``sample``, a micro-batch like those of training (a tensor or several, which count on rank 0; others give any), makes the pipeline
    measure stages, ranks and links, and take the fastest schedule and cuts that fit into ``rank_bytes`` of each rank, as ``measure_pipeline``
    and ``plan_pipeline`` do, whose ``state_bytes_per_byte`` and ``may_replicate`` it takes; ``sample_loss(*outputs)`` is their ``loss``, for a micro-batch of the sample; ``plan`` says what was chosen. With a ``schedule`` by name, the fastest of that name.

    With ``replicas``, so many pipelines train alike on batches of their own: the group has as many ranks for each rank of the
    schedule, which follow each other. Where their ranks are not alike, ``replica_cuts`` are the cuts of each. ``shard`` says how ranks that
    have the same stages (replicas, the two directions of ``"chimera"`` and ``"dualpipe"``, or those of ``ranks_per_chunk``) keep them, by the names of ``reef.shard``:
    ``dict(stage="optimizer", mixed_precision=torch.bfloat16)``. It works with one replica, too. Not for pipelines:
    ``reduction``, ``ignored`` and ``compression``.

    With ``recompute`` a rank keeps of each pass what enters its chunk, and runs the chunk's stages once more before their backward
    pass, as ``reef.checkpoint`` does: they must compute the same again. Runs of stages, ``[(2, 5), (5, 7)]`` (of each the first stage, and the one behind
    the last), are recomputed each by itself, and others not at all; a run that lies within another one follows it, and is recomputed once more when
    that one is. No bit changes. With a sample, ``recompute=True`` lets the plan recompute so few stages that ranks
    have the bytes, if that is the fastest.

    A module whose attribute ``gives`` is a tuple of names gives tensors to later stages besides its outputs, and one with ``takes`` takes
    them besides its inputs: they come last in what it returns, and in what it is called with, in the order of the names. A tensor
    is sent straight to each chunk that takes it, and must not be modified in place. ::

        class Down(torch.nn.Module):
            gives = ("fine",)

            def forward(self, x):
                return self.pool(x), x

    Stages may share weights, also where they are on different ranks (an embedding and the head of a language model, say): each of
    these ranks has the parameter, and their gradients are added up. Modules show by themselves what they share; where stages are made
    by functions, ``tied`` names it: ``[["0.weight", "11.weight"]]``.

    For ``train`` by ``"hetpipe"`` (2005.14038) replicas are virtual workers, each with an optimizer and weights of its own. After each batch a
    worker's weights become the sum of what all workers' batches have changed, up to ``staleness`` batches before, and of its own later ones.

    For ``train`` by ``"pipemare"`` (1910.05124, section 3): its first ``synchronous_batches``, over all calls, are by ``"1f1b"`` (also with
    ``"pipedream"``), and with ``correction_decay`` above 0 (exp(-2) in the paper) backward passes use ``w - delay * d`` instead of the
    newest weights ``w``, where d follows their changes: ``d = g * d + (1 - g) * (w after - w before an update)`` with
    ``g = correction_decay ** (1 / delay)`` and the chunk's ``train_schedule(count).delays()``. ``pipemare_rate`` gives learning rates.

    ``reduction`` is ``"mean"``, which divides gradients by the number of micro-batches of all replicas when all are added up,
    or ``"sum"``. Random numbers in a stage depend on ``seed``, and on the numbers of the call, the micro-batch and the stage,
    and on nothing else.

    Gradients are bit for bit those of one process that takes one micro-batch after another, adds their gradients up, for each
    rank that has the stage those of its own micro-batches, adds these sums up in the order of replicas, and of ranks in each, and then divides them. All ranks make the same calls in the
    same order. Raises ValueError on every rank if their options differ or the schedule cannot be run."""

    def __init__(
        self,
        stages: torch.nn.Sequential | Chain | Iterable[torch.nn.Module | Maker],
        group: torch.distributed.ProcessGroup,
        *,
        micro_batches: int = 1,
        schedule: str | PipelineSchedule = "",
        chunks_per_rank: int = 0,
        hops: Iterable[int] = (),
        ranks_per_chunk: Iterable[int] = (),
        cuts: Iterable[int] = (),
        replicas: int = 1,
        replica_cuts: Iterable[Iterable[int]] = (),
        staleness: int = 0,
        shard: Mapping[str, Any] | None = None,
        recompute: bool | Iterable[tuple[int, int]] = False,
        tied: Iterable[Iterable[str]] = (),
        reduction: str = "mean",
        seed: int = 0,
        sample: Tensors = None,
        rank_bytes: str | int | None = None,
        state_bytes_per_byte: float = 2.0,
        may_replicate: bool = False,
        sample_loss: Callable[..., torch.Tensor] | None = None,
        synchronous_batches: int = 0,
        correction_decay: float = 0.0,
    ) -> None:
        places = _stages(stages)
        made: dict[str, torch.nn.Module] = {}
        makers = [number_of(_maker(name, stage, made)) for name, stage in places]
        given = schedule if isinstance(schedule, PipelineSchedule) else None
        whole = all(isinstance(stage, torch.nn.Module) for _, stage in places)
        self._pipeline = torch.ops.reef.make_pipeline(
            makers, whole, _boxed(group), micro_batches, "" if given else schedule, chunks_per_rank, list(hops), list(ranks_per_chunk),
            given.json() if given else "", list(cuts), replicas, [list(each) for each in replica_cuts], staleness, shard_options(**(shard or {})), recompute is True,
            _ends(() if isinstance(recompute, bool) else recompute), [list(names) for names in tied],
            reduction, seed, batch_tensors(sample), 0 if rank_bytes is None else parse_bytes(rank_bytes), state_bytes_per_byte, may_replicate,
            _loss_of_outputs(sample_loss), synchronous_batches, correction_decay,
        )  # fmt: skip
        self._schedule = PipelineSchedule.from_json(self._pipeline.schedule())
        self._rank = group.rank() // replicas  # of the pipeline
        firsts = [0, *self.cuts, len(places)]
        own = [
            name
            for chunk in range(len(self._schedule.rank_of[0]))
            for name, _ in places[firsts[chunk] : firsts[chunk + 1]]
            if any(rank_of[chunk] == self._rank for rank_of in self._schedule.rank_of)
        ]
        self._modules = {name: made[name] for name in own}
        native = self._pipeline
        self._stepped = Stepped(lambda optimizer: _before_step(native, optimizer, alone=group.size() == 1))
        self._stepped.take_up(self.parameters())

    def parameters(self) -> list[torch.Tensor]:
        """What this rank's optimizer steps: the parameters of its stages, or what ``reef.shard`` makes of them (masters, or parts,
        see ``Shard.parameters``)."""
        return self._pipeline.parameters()

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """With their names in the whole model: ``"3.weight"`` is that of stage 3; of a part ``"3.weight[first:last]"``."""
        return list(zip(self._pipeline.names(), self.parameters(), strict=True))

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the gradients of all ranks so that their joint 2-norm is ``max_norm`` at most, as ``reef.clip_grad_norm_`` does
        in one process, with the same bits; returns the norm that they had. All ranks call it alike. (A norm of
        ``parameters()`` alone would be that of this rank's stages.)"""
        return self._pipeline.clip_grad_norm_(max_norm)

    def modules(self) -> dict[str, torch.nn.Module]:
        """This rank's stages by their names."""
        return dict(self._modules)

    @property
    def schedule(self) -> PipelineSchedule:
        return self._schedule

    @property
    def plan(self) -> str:
        """What was planned for the sample, and what it is expected to cost; empty without one."""
        return self._pipeline.plan()

    @property
    def cuts(self) -> list[int]:
        """The first stage of each chunk but the first."""
        return self._pipeline.cuts()

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent for gradients and parameters, to the other ranks that have its stages."""
        return self._pipeline.sent_bytes()

    # ---- states: either kind is loaded by a pipeline of any cut, schedule, stage and number of ranks, by a Shard and by one process

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """The state dict of the whole model, with the names of ``named_parameters``, as copies on the CPU. All ranks call this;
        ``rank0_only``: an empty one on the others. Of running statistics that replicas have each their own, those of the first.
        Rank 0 receives the others' stages, one rank after another, and passes them on."""
        with self._on_all():
            for name, module in self._modules.items():
                if extra := next((key for key in module.state_dict() if is_extra(key)), None):
                    raise ValueError(f"stage {name} has {extra}, which is no tensor, and a pipeline's state dict has tensors only")
        return dict(self._pipeline.full_state_dict(rank0_only))

    def sharded_state_dict(self) -> dict[str, torch.Tensor]:
        """What this rank keeps: see ``Shard.sharded_state_dict``. Shares its memory."""
        return dict(self._pipeline.sharded_state_dict())

    def load_state_dict(self, *state_dicts: Mapping[str, torch.Tensor]) -> None:
        """Of one full state dict, or of the sharded ones of all ranks of the run that saved them. All ranks call this; if any gives
        nothing, all are given what rank 0 has. Raises ValueError on all ranks, before anything has changed, if something is
        missing, unknown or of another shape on one of them."""
        with self._on_all():
            given = [tensors_of(each) for each in state_dicts if each]
            if extra := next((key for each in state_dicts for key in each if is_extra(key)), None):
                raise ValueError(f"the state that is loaded has {extra}, and a pipeline's state dict has tensors only")
        self._pipeline.load_state_dict(given)

    def _states(self) -> torch.ScriptObject:
        return self._pipeline

    def step(self, batch: Tensors, loss: Callable[..., torch.Tensor], *targets: torch.Tensor) -> torch.Tensor:
        """Runs forward and backward for all micro-batches, and adds this call's gradients to those that the parameters have.
        ``batch``, a tensor or several, counts on the ranks with the first stage, others may give None; each replica has its own,
        which is cut along dimension 0. ``loss(*outputs, *targets)`` gives the loss of a micro-batch, a single number, from the last stage's
        outputs and its rows of ``targets``, on the ranks with the last stage. Returns the mean (or sum) of the losses of all
        replicas, on every rank.

        If a stage or the loss raises, its rank raises that, and the others torch.distributed.DistError, which says on which
        rank, in which chunk and for which micro-batch; gradients are then what they were."""
        rows: list[Sequence[torch.Tensor]] = []

        def of_micro_batch(number: torch.Tensor, *outputs: torch.Tensor) -> list[torch.Tensor]:
            if not rows:
                rows.extend(rows_of(targets, self._schedule.micro_batches))
            return _single(loss(*outputs, *(each[int(number)] for each in rows)))

        with first_stage_input(lambda: batch_tensors(batch)) as tensors:
            return torch.ops.reef.pipeline_step(self._pipeline, tensors, number_of(of_micro_batch))

    def train(
        self,
        batches: Iterable[Sequence[Any]],
        loss: Callable[..., torch.Tensor],
        update: Callable[[], Any],
        *,
        count: int | None = None,
    ) -> torch.Tensor:
        """Trains on one batch after another, without waiting between them until all ranks are done with one. ::

            losses = pipeline.train(loader, torch.nn.functional.cross_entropy, optimizer.step)

        ``batches`` gives ``(batch, *targets)``, as ``step`` takes them, on ranks that have the first stage or the last; it is not read
        on others. ``count`` says how many are trained on; without it ``len(batches)`` does. ``update()`` is called on each rank whenever one of its chunks
        has the gradients of a batch; only the parameters of that chunk have gradients then, which are freed afterwards.
        Returns the loss of each batch, on every rank.

        By a synchronous schedule, parameters are bit for bit those of ``step`` and ``update``, batch after batch. An asynchronous one
        (``"pipedream_2bw"``, say) begins a batch before the weights are updated by all earlier ones; passes use the versions of
        weights that ``train_schedule(count).weights()`` lists, bit for bit. When the call ends, all chunks have had the same number
        of updates.

        Fails as ``step`` does. If chunks have had different numbers of updates then, this and the other calls that run the model
        raise ValueError, which says how many, until ``load_state_dict`` has been called. Chunks that are sharded or share weights, and schedules
        of two directions, are trained by ``step``, batch after batch, with one call of ``update`` for each; ValueError by an asynchronous schedule. Each version of weights besides the newest costs a rank as much as its weights
        that are trained."""
        if count is None and not isinstance(batches, Sized):
            raise TypeError("Pipeline.train: the batches do not say how many they are: give count")
        number = len(batches) if count is None else count
        directions, micro_batches = self._schedule.rank_of, self._pipeline.micro_batches_of_batch()
        has_first = any(rank_of[0] == self._rank for rank_of in directions)
        losses = sum(directions[m % len(directions)][-1] == self._rank for m in range(micro_batches))
        given = PipelineBatches(batches, micro_batches, has_first, losses)

        def of_micro_batch(batch: torch.Tensor, micro_batch: torch.Tensor, *outputs: torch.Tensor) -> list[torch.Tensor]:
            return _single(loss(*outputs, *given.targets(int(batch), int(micro_batch))))

        def of_batch(batch: torch.Tensor) -> list[torch.Tensor]:
            return given.inputs(int(batch))

        def run_update() -> list[torch.Tensor]:
            update()
            return []

        return torch.ops.reef.pipeline_train(
            self._pipeline, number, number_of(of_batch), number_of(of_micro_batch), number_of(run_update)
        )

    def train_schedule(self, count: int) -> PipelineSchedule:
        """What ``train`` runs for so many batches."""
        return PipelineSchedule.from_json(torch.ops.reef.pipeline_train_schedule(self._pipeline, count))

    def forward(self, batch: Tensors) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Runs forward only, without a graph. Returns the last stage's output for the whole batch of a replica on its rank with
        that stage (in the first direction of the schedule), and None on the others."""
        with first_stage_input(lambda: batch_tensors(batch)) as tensors:
            outputs = torch.ops.reef.pipeline_forward(self._pipeline, tensors)
        if not outputs:
            return None
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    __call__ = forward

    def generate(self, starts: Sequence[Tensors] | None, steps: int, next: Callable[..., Tensors]) -> None:
        """Runs forward again and again, without a graph, for as many lanes at once as there are micro-batches: sequences that are
        generated, say. Lane i begins with ``starts[i]``, a tensor or several, and goes on with what ``next(lane, step, *outputs)``
        gives on the rank with the last stage, which travels to the rank with the first one, until that is None or so many ``steps``
        are over. While a lane waits for what follows, ranks compute others: with a lane for each rank, and one more for each hop of
        a slow link, none waits. Modules learn by ``reef.pipeline_micro_batch()`` for which lane they compute, so that they can keep
        what they need from step to step (keys and values of attention). ``starts`` count on the rank with the first stage, others may
        give None. All ranks call this alike. Raises as ``forward`` does. ::

            def following(lane, step, logits):
                token = logits[-1:].argmax(-1)
                texts[lane].append(token)
                return None if token == end else token

            pipeline.generate(prompts, 100, following)"""

        def call(lane: torch.Tensor, step: torch.Tensor, *outputs: torch.Tensor) -> list[torch.Tensor]:
            return batch_tensors(next(int(lane), int(step), *outputs))

        with first_stage_input(lambda: [batch_tensors(start) for start in starts or ()]) as lanes:
            torch.ops.reef.pipeline_generate(self._pipeline, lanes, steps, number_of(call))


def pipeline_micro_batch() -> int | None:
    """The micro-batch for which this thread computes a stage of a pipeline, or the lane of ``generate``; None outside of stages."""
    return torch.ops.reef.pipeline_micro_batch()


def _before_step(native: torch.ScriptObject, optimizer: torch.optim.Optimizer, *, alone: bool) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and not alone:
        raise ValueError("LBFGS steps along one direction of all parameters, of which this rank has some: take another optimizer")
    native.clear_gradients()


def _maker(
    name: str, stage: torch.nn.Module | Maker, made: dict[str, torch.nn.Module]
) -> Callable[[], list[torch.Tensor]]:
    """What the library calls for a stage that it needs here: tensors of the numbers of two functions, which run it and give its
    buffers as they are, of the names of its parameters and buffers, of what it gives and takes, and its parameters."""

    def make() -> list[torch.Tensor]:
        module = stage if isinstance(stage, torch.nn.Module) else stage()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"Pipeline: what makes stage {name} returned {type(module).__name__}, not a torch.nn.Module")
        made[name] = module
        named = {f"{name}.{own}": parameter for own, parameter in module.named_parameters(remove_duplicate=False)}
        saved = module.state_dict().keys()
        buffers = [own for own, _ in module.named_buffers(remove_duplicate=False) if own in saved]

        def buffers_now() -> list[torch.Tensor]:
            return [module.get_buffer(own) for own in buffers]

        names = [*named, *(f"{name}.{own}" for own in buffers)]
        skips = (getattr(module, "gives", ()), getattr(module, "takes", ()))
        for which in skips:
            if isinstance(which, str) or not all(isinstance(each, str) and "\n" not in each for each in which):
                raise TypeError(f"Pipeline: gives and takes of stage {name} are tuples of names, a line each")
        functions = torch.tensor([number_of(_runner(name, module)), number_of(buffers_now)])
        return [functions, _lines(names), *map(_lines, skips), *named.values()]

    return make


def _lines(names: Iterable[str]) -> torch.Tensor:
    return torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8)


def _stages(
    stages: torch.nn.Sequential | Chain | Iterable[torch.nn.Module | Maker],
) -> list[tuple[str, torch.nn.Module | Maker]]:
    """With their names."""
    places = _places(stages)
    for name, stage in places if isinstance(stages, Chain) else ():
        if not isinstance(stage, torch.nn.Module):
            raise TypeError(f"Pipeline: stage {name} of the Chain is a {type(stage).__name__}, not a torch.nn.Module, so its parameters are not known")
    return places


def _runner(name: str, module: torch.nn.Module) -> Callable[..., list[torch.Tensor]]:
    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = module(*inputs)
        listed = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        if not isinstance(listed, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in listed):
            raise TypeError(f"Pipeline: stage {name} returned {kind_of(outputs)}, not a tensor or a tuple of tensors")
        return list(listed)

    return run


def _loss_of_outputs(loss: Callable[..., torch.Tensor] | None) -> int | None:
    """The number of a loss that has no targets."""
    return None if loss is None else number_of(lambda *outputs: _single(loss(*outputs)))


def _single(loss: Any) -> list[torch.Tensor]:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"Pipeline: the loss returned {kind_of(loss)}, not a tensor of one number")
    return [loss]
