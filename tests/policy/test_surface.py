"""The public surface against golden files: a change of it is a visible diff.

After a wanted change: REEF_UPDATE_GOLDEN=1 pytest tests/policy/test_surface.py
"""

import inspect
import os
import re
import subprocess

import torch

import reef

UPDATE = "REEF_UPDATE_GOLDEN" in os.environ


def compare(path, lines):
    text = "".join(f"{line}\n" for line in lines)
    if UPDATE:
        path.write_text(text)
    assert path.read_text() == text


def exported(library):
    out = subprocess.run(["nm", "-DC", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout
    for line in out.splitlines():
        _, kind, name = line.split(" ", 2)
        yield kind, name


def library(build_dir):
    return next(path for path in build_dir.glob("libreef.so*") if not path.is_symlink())


def test_exported_functions(root, build_dir):
    # Functions proper (T); vtables, type information and inline templates of the standard library and torch are weak.
    names = sorted({name for kind, name in exported(library(build_dir)) if kind == "T"})
    names = [name.replace("c10::ArrayRef<", "ArrayRef<") for name in names]
    compare(root / "tests" / "policy" / "exported_symbols.txt", names)


def test_nothing_foreign_is_exported(build_dir):
    strong = [name for kind, name in exported(library(build_dir)) if kind in "TDBR"]
    foreign = [name for name in strong if not re.match(r"(non-virtual thunk to |typeinfo (name )?for |vtable for )?reef::", name)]
    assert foreign == []


def python_surface(module=reef):
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            yield f"module {name}"
            yield from ("    " + line for line in python_surface(thing))
        elif inspect.isclass(thing) and not thing.__module__.startswith("reef"):
            yield f"class {name} = {thing.__module__}.{thing.__qualname__}"
        elif inspect.isclass(thing) and issubclass(thing, Exception):
            yield f"class {name}({thing.__base__.__name__})"
        elif inspect.isclass(thing):
            yield f"class {name}{inspect.signature(thing)}"
            for member, value in sorted(vars(thing).items()):
                if member.startswith("_"):
                    continue
                if isinstance(value, property):
                    yield f"    {member} -> {inspect.signature(value.fget).return_annotation}"
                elif callable(value):
                    yield f"    {member}{inspect.signature(value)}"
                else:
                    yield f"    {member}"
        elif callable(thing):
            yield f"def {name}{inspect.signature(thing)}"
        else:
            yield f"{name}: {type(thing).__name__}"


def test_python_surface(root):
    compare(root / "tests" / "policy" / "python_surface.txt", list(python_surface()))


def test_operator_schemas(root):
    schemas = [str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("reef::")]
    compare(root / "tests" / "policy" / "operators.txt", sorted(schemas))
