"""How many of the laws of reef.testing.optim an optimizer keeps: ours, torch's, and those of peers that are installed
(bitsandbytes). JSON lines as in benchmarks/harness.h."""

import importlib
import json

import reef
import torch
from reef.testing.optim import check


def candidates():
    for state in reef.optim.STATES:
        yield f"reef.optim.AdamW, {state}", reef.optim.AdamW, {"state": state, "min_quantized_numel": 0}
    for name in ("Adam", "SGD", "Lion", "RMSprop", "Adagrad", "LAMB", "LARS"):
        yield f"reef.optim.{name}, int8", getattr(reef.optim, name), {"state": "int8", "min_quantized_numel": 0}
    for name in ("AdamW", "SGD", "RMSprop", "Adagrad"):
        yield f"torch.optim.{name}", getattr(torch.optim, name), {}
    yield "torch.optim.AdamW, fused", torch.optim.AdamW, {"fused": True}
    try:
        peer = importlib.import_module("bitsandbytes")
    except ImportError:
        return
    for name in ("AdamW", "AdamW8bit", "Lion8bit"):
        yield f"bitsandbytes {peer.__version__} {name}", getattr(peer.optim, name), {}


def main():
    for name, optimizer, options in candidates():
        outcomes = check(optimizer, **options)
        broken = [outcome.law for outcome in outcomes if not outcome.kept]
        kept = len(outcomes) - len(broken)
        context = f"of {len(outcomes)}" + (f"; broken: {', '.join(broken)}" if broken else "")
        print(json.dumps({"name": f"laws/{name}", "value": kept, "unit": "laws kept", "context": context}), flush=True)


if __name__ == "__main__":
    main()
