"""One rank of tests/python/test_pipeline.py: what programs give a pipeline by mistake. Each row is known on one rank only, which
raises what is wrong; the others learn of it, nothing is left behind, and the next step has the bits that it has without."""

import numpy
import torch
from pipeline_ranks import chain, data
from torch import nn
from torch.nn.functional import cross_entropy

import reef

MICRO_BATCHES = 4
GROUP = reef.init_process_group()
LAST = GROUP.size() - 1


def step(pipeline, batch=None, loss=cross_entropy, targets=None):
    """With the batch and the targets only where they count."""
    x, y = data(0)
    batch = (x if batch is None else batch) if GROUP.rank() == 0 else None
    return pipeline.step(batch, loss, (y if targets is None else targets) if GROUP.rank() == LAST else None)


def train(pipeline, batch=None, targets=None):
    x, y = data(0)
    batches = [(x if batch is None else batch, y if targets is None else targets), (x, y)]
    return pipeline.train(batches, cross_entropy, lambda: None)


def generate(pipeline, starts=None, following=None):
    starts = [torch.ones(1, 4)] * MICRO_BATCHES if starts is None else starts
    return pipeline.generate(starts if GROUP.rank() == 0 else None, 2, following or (lambda lane, step, output: None))


def rows():
    """What is called, on which rank it is known to be wrong, what that raises, and words of it."""
    x, y = data(0)
    batches = [({"x": x}, TypeError, "this is dict"), (x.numpy(), TypeError, "this is ndarray"), ([x, 3], TypeError, "this is list of Tensor, int"),
               ("x", TypeError, "this is str"), (x[:3], ValueError, "3 rows cannot be cut into 4"), ([x, x[:5]], ValueError, "as many in every tensor"),
               (torch.tensor(1.0), ValueError, "have rows"), ([], ValueError, "was given no batch")]  # fmt: skip
    for batch, error, words in batches:
        yield lambda p, batch=batch: step(p, batch), 0, error, words
        yield lambda p, batch=batch: p.forward(batch if GROUP.rank() == 0 else None), 0, error, words
        yield lambda p, batch=batch: train(p, batch), 0, error, words
    targets = [({"y": y}, TypeError, "a target is a tensor"), (3, TypeError, "this is int"), ([y], TypeError, "this is list of Tensor"),
               (numpy.ones(8), TypeError, "this is ndarray"), (y[:5], ValueError, "batch_size"), (torch.tensor(1), RuntimeError, "at least a 1-dimensional")]  # fmt: skip
    for target, error, words in targets:
        yield lambda p, target=target: step(p, targets=target), LAST, error, words
        yield lambda p, target=target: train(p, targets=target), LAST, error, words
    nothing = "depends on nothing that requires grad"
    losses = [(lambda o, t: None, TypeError, "returned NoneType"), (lambda o, t: 1.0, TypeError, "returned float"),
              (lambda o, t: cross_entropy(o, t, reduction="none"), ValueError, "single floating-point number"),
              (lambda o, t: (o.argmax(1) == t).sum(), ValueError, "single floating-point number"),
              (lambda o, t: (o.argmax(1) == t).float().mean(), ValueError, nothing), (lambda o, t: cross_entropy(o, t).detach(), ValueError, nothing),
              (lambda o, t: cross_entropy(torch.tensor(o.tolist()), t), ValueError, nothing), (lambda o: o.sum(), TypeError, "positional argument")]  # fmt: skip
    for loss, error, words in losses:
        yield lambda p, loss=loss: step(p, loss=loss), LAST, error, words
    starts = [([torch.ones(1, 4), {"x": x}] * 2, TypeError, "this is dict"), (3, TypeError, "not iterable"),
              ([torch.ones(1, 4)] * 3, ValueError, "3 lanes, and the pipeline has 4"), ([torch.ones(1, 4), "x"] * 2, TypeError, "this is str")]  # fmt: skip
    for start, error, words in starts:
        yield lambda p, start=start: generate(p, start), 0, error, words
    yield lambda p: generate(p, following=lambda lane, step, output: "x"), LAST, TypeError, "this is str"


def raised_by(call, pipeline):
    try:
        call(pipeline)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def main():
    torch.manual_seed(3)
    pipeline = reef.Pipeline(chain(), GROUP, micro_batches=MICRO_BATCHES)
    parameters = pipeline.parameters()
    step(pipeline)
    gradients = [parameter.grad.clone() for parameter in parameters]
    for number, (call, known_on, kind, words) in enumerate(rows()):
        before = [parameter.grad.clone() for parameter in parameters]
        error = raised_by(call, pipeline)
        expected = kind if GROUP.rank() == known_on else torch.distributed.DistError
        assert isinstance(error, expected), (number, words, repr(error))
        assert words in str(error) if GROUP.rank() == known_on else f"rank {known_on}" in str(error), (number, words, repr(error))
        assert all(torch.equal(parameter.grad, was) for parameter, was in zip(parameters, before, strict=True)), (number, words)
        for parameter in parameters:
            parameter.grad = None
        step(pipeline)
        assert all(torch.equal(parameter.grad, was) for parameter, was in zip(parameters, gradients, strict=True)), (number, words)
    frozen = [module.requires_grad_(False) for module in nn.Sequential(*chain())]
    assert isinstance(raised_by(step, reef.Pipeline(frozen, GROUP, micro_batches=MICRO_BATCHES)), (ValueError, torch.distributed.DistError))


if __name__ == "__main__":
    main()
