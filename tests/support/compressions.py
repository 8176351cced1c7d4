"""Every compression that Reef offers, by name, with options of a test's size: a method that is added later is among them."""

import re

import reef

SMALL = {"density": 0.1, "rank": 2, "bits": 4, "entropy_coded": True, "seed": 3, "warmup_steps": 2}


def names() -> list[str]:
    """All but "auto", which is one of the others."""
    try:
        reef.Compression("?")
    except ValueError as error:
        return [name for name in re.findall(r'"(\w+)"', str(error)) if name != "auto"]
    raise AssertionError("a compression without a name was not refused")


def of_gradients() -> list[str]:
    """Those by which a gradient arrives, and no momentum for an optimizer of its own."""
    return [name for name in names() if name != "one_bit_adam"]


def small(name: str) -> reef.Compression:
    """With those of ``SMALL`` that the method takes."""
    taken = {}
    for option, value in SMALL.items():
        try:
            reef.Compression(name, **{option: value})
            taken[option] = value
        except ValueError:
            pass
    return reef.Compression(name, **taken)
