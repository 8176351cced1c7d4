"""Models that are cut over ranks, trained and run in micro-batches as a schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed

from . import _library  # noqa: F401  (the operators)
from ._function import number_of
from .pipeline_schedule import PipelineSchedule
from .process_group import _boxed

Maker = Callable[[], torch.nn.Module]
Tensors = torch.Tensor | Sequence[torch.Tensor] | None


class Pipeline:
    """A model that is a chain of stages, cut over the ranks of ``group``. ::

        pipeline = reef.Pipeline(model, group, micro_batches=16)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        for batch, target in data:
            loss = pipeline.step(batch, torch.nn.functional.cross_entropy, target)
            optimizer.step()
            optimizer.zero_grad()

    ``stages``: a ``torch.nn.Sequential``, or a list of modules, or of functions that make them: then each rank makes its own
    stages only, so the whole model need not fit on one. A stage is called with the outputs of the one before and returns a
    tensor or a tuple of tensors, of any dtypes. ``schedule`` is a name of ``PIPELINE_SCHEDULES``, for which
    ``chunks_per_rank`` and ``hops`` are as in ``pipeline_schedule``, or a ``PipelineSchedule``; it must be synchronous and have
    one replica of the model. ``cuts`` are the first stages of each chunk but the first; by default
    each chunk has as many stages as the others. ``reduction`` is ``"mean"``, which divides gradients by the number of
    micro-batches when all are added up, or ``"sum"``. Random numbers in a stage depend on ``seed``, and on the numbers of the
    call, the micro-batch and the stage, and on nothing else.

    Gradients are bit for bit those of one process that takes one micro-batch after another, adds their gradients up and then
    divides them. All ranks make the same calls in the same order. Raises ValueError on every rank if their options differ or the
    schedule cannot be run."""

    def __init__(
        self,
        stages: torch.nn.Sequential | Iterable[torch.nn.Module | Maker],
        group: torch.distributed.ProcessGroup,
        *,
        micro_batches: int = 1,
        schedule: str | PipelineSchedule = "1f1b",
        chunks_per_rank: int = 0,
        hops: Iterable[int] = (),
        cuts: Iterable[int] = (),
        reduction: str = "mean",
        seed: int = 0,
    ) -> None:
        places = _places(stages)
        made: dict[str, torch.nn.Module] = {}
        makers = [number_of(_maker(name, stage, made)) for name, stage in places]
        given = schedule if isinstance(schedule, PipelineSchedule) else None
        whole = all(isinstance(stage, torch.nn.Module) for _, stage in places)
        self._pipeline = torch.ops.reef.make_pipeline(
            makers, whole, _boxed(group), micro_batches, "" if given else schedule, chunks_per_rank, list(hops),
            given.json() if given else "", list(cuts), reduction, seed,
        )  # fmt: skip
        self._schedule = PipelineSchedule.from_json(self._pipeline.schedule())
        firsts = [0, *self.cuts, len(places)]
        own = [
            name
            for chunk, rank in enumerate(self._schedule.rank_of[0])
            for name, _ in places[firsts[chunk] : firsts[chunk + 1]]
            if rank == group.rank()
        ]
        self._modules = {name: made[name] for name in own}
        self._named = _named_parameters(self._modules)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Those of this rank's stages."""
        return list(self._named.values())

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """With their names in the whole model: ``"3.weight"`` is that of stage 3."""
        return list(self._named.items())

    def modules(self) -> dict[str, torch.nn.Module]:
        """This rank's stages by their names."""
        return dict(self._modules)

    @property
    def schedule(self) -> PipelineSchedule:
        return self._schedule

    @property
    def cuts(self) -> list[int]:
        """The first stage of each chunk but the first."""
        return self._pipeline.cuts()

    def step(self, batch: Tensors, loss: Callable[..., torch.Tensor], *targets: torch.Tensor) -> torch.Tensor:
        """Runs forward and backward for all micro-batches, and adds this call's gradients to those that the parameters have.
        ``batch``, a tensor or several, counts on the rank with the first stage, others may give None; it is cut along
        dimension 0. ``loss(*outputs, *targets)`` gives the loss of a micro-batch, a single number, from the last stage's
        outputs and its rows of ``targets``, on the rank with the last stage. Returns the mean (or sum) of the losses, on every
        rank.

        If a stage or the loss raises, its rank raises that, and the others torch.distributed.DistError, which says on which
        rank, in which chunk and for which micro-batch; gradients are then what they were."""
        count = self._schedule.micro_batches
        rows = [target.tensor_split(count) for target in targets]

        def of_micro_batch(number: torch.Tensor, *outputs: torch.Tensor) -> list[torch.Tensor]:
            return [loss(*outputs, *(each[int(number)] for each in rows))]

        return torch.ops.reef.pipeline_step(self._pipeline, _list_of(batch), number_of(of_micro_batch))

    def forward(self, batch: Tensors) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Runs forward only, without a graph. Returns the last stage's output for the whole batch on the rank that has it, and
        None on the others."""
        outputs = torch.ops.reef.pipeline_forward(self._pipeline, _list_of(batch))
        if not outputs:
            return None
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    __call__ = forward


def _maker(
    name: str, stage: torch.nn.Module | Maker, made: dict[str, torch.nn.Module]
) -> Callable[[], list[torch.Tensor]]:
    """What the library calls for a stage that it needs here: a tensor of the number of the function that runs it, one of its
    parameters' names, and these."""

    def make() -> list[torch.Tensor]:
        module = stage if isinstance(stage, torch.nn.Module) else stage()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"Pipeline: what makes stage {name} returned {type(module).__name__}, not a torch.nn.Module")
        made[name] = module
        named = _named_parameters({name: module})
        names = torch.tensor(list("\n".join(named).encode()), dtype=torch.uint8)
        return [torch.tensor(number_of(_runner(module))), names, *named.values()]

    return make


def _named_parameters(modules: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """By their names in the whole model; those that modules share, once."""
    named: dict[str, torch.nn.Parameter] = {}
    known: set[int] = set()
    for name, module in modules.items():
        for own, parameter in module.named_parameters():
            if id(parameter) not in known:
                known.add(id(parameter))
                named[f"{name}.{own}"] = parameter
    return named


def _places(stages: torch.nn.Sequential | Iterable[torch.nn.Module | Maker]) -> list[tuple[str, torch.nn.Module | Maker]]:
    if isinstance(stages, torch.nn.Sequential):
        return list(stages._modules.items())  # named_children() gives a module once
    return [(str(index), stage) for index, stage in enumerate(stages)]


def _runner(module: torch.nn.Module) -> Callable[..., list[torch.Tensor]]:
    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = module(*inputs)
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)

    return run


def _list_of(batch: Tensors) -> list[torch.Tensor]:
    if batch is None:
        return []
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)
