"""Which rank of a pipeline computes what, in which order, with which weights, and what that costs: pure data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch

from . import _library  # noqa: F401  (the operators)
from .link import Link


@dataclass(frozen=True)
class PipelineGenerator:
    """A row of the table of schedules that the literature names."""

    name: str
    source: str
    """The paper."""
    takes: str
    """Which shapes, where not all."""
    synchronous: bool
    splits: bool
    """Whether it splits backward passes into I and W."""


PIPELINE_SCHEDULES: tuple[PipelineGenerator, ...] = tuple(
    PipelineGenerator(*row) for row in zip(*torch.ops.reef.pipeline_generators(), strict=True)
)
"""What :func:`pipeline_schedule` makes."""


@dataclass(frozen=True)
class PipelineChunkCost:
    """What one chunk costs for one micro-batch, on a rank of speed 1."""

    forward_seconds: float = 0.0
    input_seconds: float = 0.0
    """Of I."""
    weight_seconds: float = 0.0
    """Of W; a whole backward pass takes both."""
    output_bytes: int = 0
    """Of the output, which is sent to the next chunk's rank; the gradient that comes back has as many."""
    kept_bytes: int = 0
    """From F to B or I."""
    kept_after_input_bytes: int = 0
    """From I to W."""
    working_bytes: int = 0
    """What a pass needs besides while it runs."""
    fixed_bytes: int = 0
    """Parameters, gradients and states of optimizers: there always."""
    gradient_bytes: int = 0
    """Of its weights that are trained, and of their gradients, which ranks that have the same chunk add up behind the last action. Such
    a rank holds them once more than ``fixed_bytes`` says: its own sums are apart from those of all ranks. By an asynchronous schedule it
    holds as many for each version of the weights but the newest."""


@dataclass(frozen=True)
class PipelineSkip:
    """A tensor that a chunk gives to later ones besides its output, and that is sent to each of them directly. Its gradient is added up
    on its way back, from the last of them by way of the others to the chunk that has given it."""

    giver: int
    """The chunk that gives it."""
    takers: tuple[int, ...]
    """The chunks that take it, ascending."""
    bytes: int = 0
    """Of the tensor, for one micro-batch; the gradient has as many."""


def _skips(rows: Iterable[Sequence[int]]) -> tuple[PipelineSkip, ...]:
    return tuple(PipelineSkip(giver, tuple(takers), size) for giver, size, *takers in rows)


def _rows(skips: Iterable[PipelineSkip]) -> list[list[int]]:
    return [[skip.giver, skip.bytes, *skip.takers] for skip in skips]


def _ends(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Runs of stages as the library takes them, one after another. Raises ValueError for a run that is no pair."""
    return [stage for first, end in runs for stage in (first, end)]


@dataclass(frozen=True)
class PipelineCosts:
    """What chunks cost, how fast ranks are, and what links between them do."""

    chunks: Sequence[PipelineChunkCost]
    speeds: Sequence[float] = ()
    """How much faster each rank is than one of speed 1: its seconds are divided by this. Empty stands for 1."""
    links: Sequence[Link] = ()
    """From rank a to rank b: element a * ranks + b. Each is a queue: a message occupies it for ``message_seconds`` plus bytes
    over ``bytes_per_second``, and arrives ``latency_seconds`` later. A single one holds for all pairs; empty stands for links
    that take no time."""
    skips: Sequence[PipelineSkip] = ()
    """What chunks give to others besides their outputs. Its bytes are held, and sent, for each chunk that takes it."""

    def _numbers(self) -> tuple[list[list[float]], list[list[int]], list[float], list[list[float]], list[list[int]]]:
        rows = [astuple(chunk) for chunk in self.chunks]
        links = [[float(number) for number in astuple(link)] for link in self.links]
        seconds = [[float(number) for number in row[:3]] for row in rows]
        return seconds, [list(row[3:]) for row in rows], [float(speed) for speed in self.speeds], links, _rows(self.skips)


@dataclass(frozen=True)
class PipelineRankCost:
    """What a rank does in a simulation."""

    busy_seconds: float
    begin_seconds: float
    """Of its first action."""
    end_seconds: float
    """Of its last one."""
    most_in_flight: int
    """Pairs of chunk and micro-batch between F and B or W, at most."""
    peak_bytes: int
    """With messages that have not been sent yet, or not been used, and memory that is ready for those that come next: two from each other
    rank, if a message has at most 16 MiB."""


@dataclass(frozen=True)
class PipelineCost:
    """What a schedule costs."""

    makespan_seconds: float
    """From the first begin to the last end, and the reduction behind it."""
    reduction_seconds: float
    """In which ranks that have the same chunk add up its gradients."""
    ranks: tuple[PipelineRankCost, ...]
    messages: int
    message_bytes: int
    begin_seconds: tuple[tuple[float, ...], ...]
    """Of each action of each rank."""
    end_seconds: tuple[tuple[float, ...], ...]

    @property
    def idle_share(self) -> float:
        """The share of the makespan in which ranks do not compute."""
        every = self.makespan_seconds * len(self.ranks)
        return 1 - sum(rank.busy_seconds for rank in self.ranks) / every if every > 0 else 0.0


@dataclass(frozen=True)
class PipelineMessage:
    """A message that a schedule implies."""

    kind: str
    """``"output"`` of ``chunk``, for the next chunk, or ``"gradient"`` of its input, for the chunk before; and what goes to ``to_chunk``
    of skips."""
    chunk: int
    """The chunk that has made it."""
    to_chunk: int
    """The chunk that needs it."""
    micro_batch: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class PipelineVersion:
    """The weights that a chunk uses for a micro-batch. Version v is the weights after v updates of the chunk."""

    forward: int
    backward: int
    others_waves: int
    """Of the rule ``"wave"``: the number of waves of every other virtual worker that both contain."""


@dataclass(frozen=True)
class PipelineVersionRule:
    """Which version of a chunk's weights a pass uses."""

    rule: str = "flush"
    """``"flush"``: the weights as they were before the schedule; ``"stash"``: the newest at the forward pass, kept for the
    backward pass; ``"vertical"``: that which chunk 0 used for the micro-batch; ``"two_buffers"``: one update behind;
    ``"newest"``: the newest at each pass; ``"wave"``: a virtual worker's own updates, all of the same number of micro-batches
    ago."""
    micro_batches_per_update: int = 1
    """Whose gradients an update adds up; of ``"wave"``, the number of a wave."""
    staleness: int = 0
    """Of ``"wave"``: by how many waves the weights may lack those of other virtual workers."""


@dataclass(frozen=True)
class PipelineSchedule:
    """Which rank computes what, in which order. A chunk is a run of consecutive layers on one rank; chunks and micro-batches are
    numbered from 0. ``"2F0"`` is the forward pass of chunk 2 for micro-batch 0; B is a whole backward pass, I the part of it
    that makes the gradient of the chunk's input, W the rest, which makes the gradients of its weights, and U an update of the
    weights. Messages are not listed: they follow."""

    name: str
    micro_batches: int
    rank_of: tuple[tuple[int, ...], ...]
    """The rank of each chunk, for each direction; micro-batch m is of direction m modulo their number."""
    actions: tuple[tuple[str, ...], ...]
    """Of each rank, in its order."""
    versions: PipelineVersionRule = PipelineVersionRule()

    @staticmethod
    def from_json(text: str) -> PipelineSchedule:
        """Reads what ``json`` has written, or what a user has written like it, in which ``versions`` may be left out. Raises
        ValueError, which names rank and action, for a schedule that cannot run."""
        of = json.loads(torch.ops.reef.check_pipeline(text))
        return PipelineSchedule(
            of["name"],
            of["micro_batches"],
            tuple(tuple(ranks) for ranks in of["rank_of"]),
            tuple(tuple(actions) for actions in of["actions"]),
            PipelineVersionRule(**of["versions"]),
        )

    def json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        """A line for each rank."""
        return torch.ops.reef.pipeline_text(self.json())

    @property
    def adds_in_order(self) -> bool:
        """Whether each rank makes the weight gradients of each of its chunks in ascending order of micro-batches: then they are added
        up as one process would that takes these micro-batches one after another."""
        return torch.ops.reef.adds_in_order(self.json())

    @property
    def receives_in_order(self) -> bool:
        """Whether each rank needs the messages of every other rank in the order in which that one sends them."""
        return torch.ops.reef.receives_in_order(self.json())

    def messages(self, skips: Iterable[PipelineSkip] = ()) -> tuple[PipelineMessage, ...]:
        """The messages in the order in which each rank sends them, rank by rank. What is for the same chunk travels together."""
        rows = torch.ops.reef.pipeline_messages(self.json(), _rows(skips))
        return tuple(PipelineMessage("gradient" if row[0] else "output", *row[1:]) for row in rows)

    def repeated(self, batches: int) -> PipelineSchedule:
        """So many batches, one after another without a barrier between them."""
        return PipelineSchedule.from_json(torch.ops.reef.repeated_pipeline(self.json(), batches))

    def weights(self) -> tuple[tuple[PipelineVersion, ...], ...]:
        """The version of the weights that each chunk uses for each micro-batch. Raises ValueError if a pass needs a version that
        its rank does not have by then."""
        rows, _ = torch.ops.reef.pipeline_versions(self.json())
        return tuple(tuple(PipelineVersion(*row[i : i + 3]) for i in range(0, len(row), 3)) for row in rows)

    def most_versions(self) -> tuple[int, ...]:
        """Of each chunk, the most versions of its weights that are held at once: the newest, and those before it that later passes
        need."""
        return tuple(torch.ops.reef.pipeline_versions(self.json())[1])

    def delays(self) -> tuple[float, ...]:
        """Of each chunk, how many updates its weights have had since a forward pass when they get its gradient, as the mean over the
        micro-batches of the last update (tau of PipeMare, 1910.05124). Raises ValueError for a schedule without updates."""
        return tuple(torch.ops.reef.pipeline_delays(self.json()))

    def cost(self, costs: PipelineCosts) -> PipelineCost:
        """Runs the schedule in virtual time. Updates take none. Raises ValueError for costs of another number of chunks, ranks
        or links, and for numbers that are negative or not finite."""
        makespan, reduction, seconds, counts, messages, message_bytes, begin, end = torch.ops.reef.simulate_pipeline(
            *costs._numbers(), self.json()
        )
        ranks = tuple(PipelineRankCost(*of, *more) for of, more in zip(seconds, counts, strict=True))
        return PipelineCost(makespan, reduction, ranks, messages, message_bytes, tuple(map(tuple, begin)), tuple(map(tuple, end)))

    def period_seconds(self, costs: PipelineCosts) -> float:
        """The seconds of a batch where ranks go on to the next one without a barrier: the fourth of four in a row."""
        return torch.ops.reef.pipeline_period_seconds(*costs._numbers(), self.json())

    def save_chart(self, path: str | Path, costs: PipelineCosts, title: str = "Pipeline") -> None:
        """Writes an SVG: time to the right, a row for each rank, and in it its actions by kind and micro-batch."""
        Path(path).write_text(torch.ops.reef.pipeline_chart(*costs._numbers(), self.json(), title))


def pipeline_schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    chunks_per_rank: int = 0,
    hops: Iterable[int] = (),
    micro_batches_per_update: int = 0,
    staleness: int = 0,
    ranks_per_chunk: Iterable[int] = (),
) -> PipelineSchedule:
    """Makes a schedule by its name in ``PIPELINE_SCHEDULES``. ``chunks_per_rank``: 0 stands for the least that the schedule can
    have. ``hops`` (``"1f1b"``, ``"zero_bubble"`` and what is asynchronous): for each hop from a chunk to the next, how many
    micro-batches more the ranks before it have in flight than those behind it, for each rank of the chunk before; empty stands for 1 everywhere, and a single
    number holds for all: :func:`hops_for` gives those that hide slow links. ``micro_batches_per_update`` and ``staleness``: see
    :class:`PipelineVersionRule`. ``ranks_per_chunk`` (``"gpipe"``, ``"1f1b"`` and ``"zero_bubble"``): how many ranks each chunk has, together
    ``ranks``, which take its micro-batches by turns and add up its gradients; empty: each chunk has one. Raises ValueError, which lists the names or says which shapes the schedule takes."""
    made = torch.ops.reef.pipeline_schedule(
        name, ranks, micro_batches, chunks_per_rank, list(hops), micro_batches_per_update, staleness, list(ranks_per_chunk)
    )
    return PipelineSchedule.from_json(made)


def pipeline_from_block(period: int, slots: Iterable[Sequence[int]], micro_batches: int) -> PipelineSchedule:
    """Repeats a building block for each micro-batch, ``period`` slots later each time: ``slots`` has four numbers of each rank,
    in which slot it begins F of its first chunk, F of its second, I of its second and I of its first; W fill the slots between.
    The chunks are placed in a V: rank r has chunks r and 2 * ranks - 1 - r. Raises ValueError if two actions of a rank meet in a
    slot, or ranks would wait for each other for ever."""
    return PipelineSchedule.from_json(torch.ops.reef.pipeline_from_block(period, [list(row) for row in slots], micro_batches))


def greedy_pipeline(
    costs: PipelineCosts,
    rank_of: Iterable[Sequence[int]],
    micro_batches: int,
    most_in_flight: Sequence[int],
    *,
    splits: bool = True,
) -> PipelineSchedule:
    """Writes a schedule in virtual time: whichever rank can begin first does so, with a backward pass rather than a forward
    pass, and with a W where nothing else could begin at once. ``rank_of`` is ``PipelineSchedule.rank_of``; a rank has at most
    ``most_in_flight`` of its passes between F and B or W at once. Raises ValueError if so few do not suffice."""
    placed = [list(direction) for direction in rank_of]
    return PipelineSchedule.from_json(
        torch.ops.reef.greedy_pipeline(*costs._numbers(), placed, micro_batches, list(most_in_flight), splits)
    )


def hops_for(
    message_seconds: Iterable[float], forward_seconds: float, backward_seconds: float, *, splits: bool = False
) -> tuple[int, ...]:
    """The least hops that hide messages which take so many seconds, for each hop, where each rank computes for
    ``forward_seconds`` and ``backward_seconds`` a micro-batch; ``splits``: where backward passes are split."""
    seconds = [float(each) for each in message_seconds]
    return tuple(torch.ops.reef.hops_for(seconds, forward_seconds, backward_seconds, splits))


def pipemare_rate(delay: float, update: int, annealing_updates: int) -> float:
    """By what PipeMare multiplies the learning rate of a chunk with such a delay (``PipelineSchedule.delays``) at update number
    ``update``: ``1 / max(delay, 1) ** (1 - min(update / annealing_updates, 1))`` (1910.05124, section 3.1)."""
    return torch.ops.reef.pipemare_rate(delay, update, annealing_updates)
