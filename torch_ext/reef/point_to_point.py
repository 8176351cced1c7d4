"""Messages between two ranks of a group, which say what they hold: dtype, shape and tag."""

from __future__ import annotations

import torch
import torch.distributed

from . import _library  # noqa: F401  (the operators)
from .process_group import _boxed


class Message:
    """A message that is under way; made by ``isend``, ``ireceive`` and ``ireceive_into``. May be dropped: the message goes on,
    and what would have been raised is lost."""

    def __init__(self, message: torch.ScriptObject) -> None:
        self._message = message

    def wait(self) -> torch.Tensor:
        """What was received, or the tensor that was given, when the message is through: not before may what is sent be
        changed, and what is received be used. Raises as ``send`` and ``receive`` do."""
        return self._message.wait()

    def is_through(self) -> bool:
        """``wait`` would not wait."""
        return self._message.is_through()


def send(tensor: torch.Tensor, to: int, group: torch.distributed.ProcessGroup, tag: int = 0) -> None:
    """Sends the values to another rank of ``group``: of any dense tensor, whatever its dtype, shape and layout. What one rank
    sends to another arrives in the order in which it was sent, each receive takes the next, and ``tag``, any number, says
    which one the program means. Returns when the receiver has found the message to be what it wants: two ranks that send to
    each other first wait for each other in vain (see ``isend``). A receive that means another tag, or receives into another
    shape or dtype, is a ValueError on both ranks, which names both shapes; the message is lost, and the next ones go on.
    Raises torch.distributed.DistError, which names the rank that is gone."""
    torch.ops.reef.send(tensor, to, _boxed(group), tag)


def receive(
    source: int, group: torch.distributed.ProcessGroup, tag: int = 0, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """The tensor that rank ``source`` of ``group`` sends next, contiguous, on ``device``."""
    return torch.ops.reef.receive(source, _boxed(group), tag, torch.device(device))


def receive_into(
    tensor: torch.Tensor, source: int, group: torch.distributed.ProcessGroup, tag: int = 0
) -> torch.Tensor:
    """Writes what comes into ``tensor``, which must have its shape and dtype, and returns it."""
    torch.ops.reef.receive_into(tensor, source, _boxed(group), tag)
    return tensor


def isend(tensor: torch.Tensor, to: int, group: torch.distributed.ProcessGroup, tag: int = 0) -> Message:
    """``send`` without waiting. The order of messages is that of the calls, also among those that wait."""
    return Message(torch.ops.reef.isend(tensor, to, _boxed(group), tag))


def ireceive(
    source: int, group: torch.distributed.ProcessGroup, tag: int = 0, device: str | torch.device = "cpu"
) -> Message:
    """``receive`` without waiting."""
    return Message(torch.ops.reef.ireceive(source, _boxed(group), tag, torch.device(device)))


def ireceive_into(
    tensor: torch.Tensor, source: int, group: torch.distributed.ProcessGroup, tag: int = 0
) -> Message:
    """``receive_into`` without waiting."""
    return Message(torch.ops.reef.ireceive_into(tensor, source, _boxed(group), tag))
