"""One rank of tests/python/test_pipeline.py: modules of many kinds, cut over ranks, against one process, with what programs put around them."""

import contextlib

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import reef

MICRO_BATCHES = 4
Linear = nn.Linear


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        sequence = x.view(1, -1, 8)
        return self.attention(sequence, sequence, sequence, need_weights=False)[0].view(-1, 8)


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


class Averaging(nn.Module):
    """Keeps a buffer that each forward pass modifies in place and uses."""

    def __init__(self):
        super().__init__()
        self.layer = Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.layer(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean


def frozen(module):
    return module.requires_grad_(False)


MODELS = {
    "layers": lambda: [Linear(8, 8), nn.GELU(), Linear(8, 8), Linear(8, 3)],
    "weight_norm": lambda: [nn.utils.parametrizations.weight_norm(Linear(8, 8)), Linear(8, 8),
                            nn.utils.parametrizations.weight_norm(Linear(8, 8)), Linear(8, 3)],
    "weight_norm by hooks": lambda: [nn.utils.weight_norm(Linear(8, 8)), Linear(8, 8), nn.utils.weight_norm(Linear(8, 8)), Linear(8, 3)],
    "spectral_norm": lambda: [nn.utils.parametrizations.spectral_norm(Linear(8, 8)), Linear(8, 8),
                              nn.utils.parametrizations.spectral_norm(Linear(8, 8)), Linear(8, 3)],
    "checkpointed": lambda: [Linear(8, 8), Checkpointed(), Checkpointed(), Linear(8, 3)],
    "recurrent": lambda: [Linear(8, 8), Recurrent(), Recurrent(), Linear(8, 3)],
    "attention": lambda: [Linear(8, 8), Attention(), Attention(), Linear(8, 3)],
    "transformer": lambda: [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), Linear(8, 8),
                            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), Linear(8, 3)],
    "detached": lambda: [Linear(8, 8), Detached(), Linear(8, 8), Linear(8, 3)],
    "averaging": lambda: [Averaging(), Linear(8, 8), Averaging(), Linear(8, 3)],
    "batch norm": lambda: [nn.BatchNorm1d(8), Linear(8, 8), nn.BatchNorm1d(8), Linear(8, 3)],
    "frozen": lambda: [frozen(Linear(8, 8)), Linear(8, 8), frozen(Linear(8, 8)), Linear(8, 3)],
    "convolution": lambda: [nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3, padding=1), nn.Flatten(), Linear(32, 3)],
    "softmax": lambda: [Linear(8, 8), nn.Softmax(-1), nn.LayerNorm(8), Linear(8, 3)],
}  # fmt: skip


def halve(parameter):
    parameter.grad.mul_(0.5)


AROUND = {
    "nothing": lambda model: None,
    "autocast": lambda model: None,
    "recompute": lambda model: None,
    "hooks": lambda model: [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model.parameters() if p.requires_grad],
    "hooks behind": lambda model: [p.register_post_accumulate_grad_hook(halve) for p in model.parameters() if p.requires_grad],
}


def made(model, around):
    torch.manual_seed(3)
    modules = nn.Sequential(*MODELS[model]())
    AROUND[around](modules)
    return modules


def alone(one, x, y):
    """The mean of the losses of one process; gradients are added to those that there are, divided."""
    before = {name: parameter.grad for name, parameter in one.named_parameters()}
    for parameter in one.parameters():
        parameter.grad = None
    losses = []
    for xs, ys in zip(x.tensor_split(MICRO_BATCHES), y.tensor_split(MICRO_BATCHES), strict=True):
        loss = F.cross_entropy(one(xs), ys)
        loss.backward()
        losses.append(loss.detach())
    for name, parameter in one.named_parameters():
        if parameter.grad is not None:
            parameter.grad /= MICRO_BATCHES
            if before[name] is not None:
                parameter.grad = before[name] + parameter.grad
    return sum(losses) / MICRO_BATCHES


def main():
    group = reef.init_process_group()
    for model in MODELS:
        for around in AROUND:
            for schedule in ("1f1b", "zero_bubble", "zbv") if group.size() < 3 else ("zero_bubble",):
                place = model, around, schedule
                one, cut = made(model, around), made(model, around)
                pipeline = reef.Pipeline(cut, group, micro_batches=MICRO_BATCHES, schedule=schedule, recompute=around == "recompute")
                mixed = torch.autocast("cpu", dtype=torch.bfloat16) if around == "autocast" else contextlib.nullcontext()
                for step in range(2):
                    torch.manual_seed(10 + step)
                    x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
                    with mixed:
                        expected, loss = alone(one, x, y), pipeline.step(x, F.cross_entropy, y)
                    assert torch.equal(loss, expected), (place, step)
                    gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
                    for name, parameter in pipeline.named_parameters():
                        gradient = gradients[name]
                        assert (parameter.grad is None) == (gradient is None), (place, step, name)
                        assert gradient is None or torch.equal(parameter.grad, gradient), (place, step, name)
                    state = pipeline.full_state_dict()  # and what follows it
                    for name, value in one.state_dict().items():
                        assert torch.equal(state[name], value), (place, step, name)


if __name__ == "__main__":
    main()
