"""One rank of tests/python/test_pipeline.py: modules that give tensors to later ones, by steps, by a plan, and what is wrong with names."""

import torch
from torch import nn

import reef


class Level(nn.Module):
    """A level of a U-Net: on the way down it gives what it has made, on the way up it takes that."""

    def __init__(self, name, *, down):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        (self.gives, self.takes) = ((name,), ()) if down else ((), (name,))

    def forward(self, x, *fine):
        x = self.layer(x + fine[0] * x if fine else x).relu()
        return (x, x) if self.gives else x


def main() -> None:
    group = reef.init_process_group()
    size = group.size()

    def levels():
        torch.manual_seed(4)
        names = ["coarse", "middle", "fine"]
        return [*(Level(name, down=True) for name in names), nn.Linear(6, 6), *(Level(name, down=False) for name in reversed(names))]

    def alone(stages, x):
        known = {}
        for stage in stages:
            made = stage(x, *(known[name] for name in getattr(stage, "takes", ())))
            x, given = (made[0], made[1:]) if isinstance(made, tuple) else (made, ())
            known |= {name: one.view_as(one) for name, one in zip(getattr(stage, "gives", ()), given, strict=True)}
        return x

    torch.manual_seed(6)
    batch, target = torch.randn(8, 6), torch.randn(8, 6)
    one = levels()
    for x, y in zip(batch.tensor_split(4), target.tensor_split(4), strict=True):
        nn.functional.mse_loss(alone(one, x), y).backward()
    expected = {f"{i}.{name}": each.grad / 4 for i, stage in enumerate(one) for name, each in stage.named_parameters()}
    for options in ({}, {"cuts": list(range(1, size))}, {"recompute": True}, {"recompute": [(1, 3), (3, 4), (5, 7)]}, {"sample": batch[:2]},
                    {"schedule": "zbv"}):  # fmt: skip
        pipeline = reef.Pipeline(levels(), group, micro_batches=4, **options)
        pipeline.step(batch, nn.functional.mse_loss, target)
        for name, parameter in pipeline.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), (name, options)
        output = pipeline.forward(batch)
        assert output is None or torch.equal(output, torch.cat([alone(one, x) for x in batch.tensor_split(4)]))
    profile = reef.measure_pipeline(levels(), batch[:2], group, repeats=1)
    assert profile.skips == tuple(reef.PipelineSkip(i, (6 - i,), 2 * 6 * 4) for i in range(3)), profile.skips
    assert profile.cut([2, 5]).skips == (reef.PipelineSkip(0, (2,), 48), reef.PipelineSkip(0, (2,), 48)), profile.cut([2, 5]).skips
    wrong = levels()
    del wrong[0]
    try:
        reef.Pipeline(wrong, group, micro_batches=2)
    except ValueError as error:
        assert "takes 'coarse', which no stage gives" in str(error), error
    else:
        raise AssertionError("a name that nobody gives")
    try:
        reef.Pipeline(levels(), group, micro_batches=2, recompute=[(3, 5), (1, 2)])
    except ValueError as error:
        assert "RecomputedRun: stages 1 to before 2" in str(error), error
    else:
        raise AssertionError("runs in another order")
    wrong = levels()
    wrong[0].gives = "coarse"
    try:
        reef.Pipeline(wrong, group, micro_batches=2)
    except (TypeError, ValueError) as error:
        assert "are tuples of names" in str(error), error
    else:
        raise AssertionError("a text in place of names")


if __name__ == "__main__":
    main()
