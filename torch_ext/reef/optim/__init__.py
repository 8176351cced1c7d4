"""Optimizers: torch.optim's own interface, fused on the CPU, with states of 32, 16, 8 or 4 bits.

``reef.optim.AdamW`` takes what ``torch.optim.AdamW`` takes, and loads and writes its checkpoints. Beside it every
optimizer here takes

``state``: how its states are kept. ``"float32"``; ``"bfloat16"`` (rounded stochastically); ``"int8"`` (one byte on a
dynamic map, a scale for each 256: 2.03 bytes a parameter for Adam); ``"int4"`` (half a byte, a scale for each 128: 1.06);
``"int4_rank1"`` (and a scale for each row and each column of a matrix's second moment); ``"companded8"`` (one byte,
companded, a scale for each 32: 2.13); ``"int8_compensated"``, ``"int4_compensated"`` and ``"companded8_compensated"`` (and
half a byte of what rounding lost, rounded by chance: 3.03, 2.06, 3.13). Tensors of fewer than ``min_quantized_numel``
elements stay in float32.

``master``: what parameters of 16 bits keep of what their rounding loses. ``"none"`` (they are rounded to the nearest, as
torch does), ``"float32"`` (a copy), ``"split"`` (a byte: 24 bits in all), ``"stochastic"`` (nothing, but rounded so that
the mean is right; the same on every rank and in every run).

A gradient that is not finite raises ``NonFiniteGradient`` with the parameter's name; blocks of 256 elements that hold
such a one, and whole matrices of ``"int4_rank1"``, are left as they were, parameter and state.
"""

from .adagrad import Adagrad
from .adam import Adam, AdamW, AdamW4bit, AdamW8bit
from .gradient_release import GradientRelease
from .lamb import LAMB
from .lars import LARS
from .lion import Lion
from .one_bit_adam import OneBitAdam
from .optimizer import MASTERS, STATES, NonFiniteGradient, Optimizer
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "MASTERS",
    "SGD",
    "STATES",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "GradientRelease",
    "Lion",
    "NonFiniteGradient",
    "OneBitAdam",
    "Optimizer",
    "RMSprop",
]
