"""Checks the machine code of the optimizers' CUDA kernels in the library, which needs no device: registers, which limit
how many blocks fit on a multiprocessor; no spilled registers; loads and stores as wide as a format's layout allows;
and no loop inside the loop over tiles. A kernel without a row in the tables is an error."""

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ARCHITECTURE = "sm_90"
REGISTERS = 65536  # of a multiprocessor
THREADS = 256  # of a block


@dataclass
class Format:
    """How many stores of each kind a thread needs for a state of this format."""
    wide: int = 0  # stores of 16 bytes
    halves: int = 0  # stores of 8 bytes
    words: int = 0  # stores of 4 bytes
    scales: int = 0  # scales of 4 bytes
    short_scales: int = 0  # scales of 2 bytes
    ragged_bytes: int = 0  # stores of single bytes in a tile that is not whole
    more: int = 0  # groups of four registers besides those for the new values


# A thread has eight elements of each state, in two halves of four because a byte holds the 4-bit codes of both halves. Four
# codes are one word, and those of a warp are 128 consecutive bytes, which is a whole cache line. docs/gpu-status.md lists the
# ways to wider stores of codes, each of which costs instructions or registers.
FORMATS = {
    "Float32State": Format(wide=2),
    "BFloat16State": Format(halves=2),
    "Int8State": Format(words=2, scales=1, ragged_bytes=8),
    "Int4State": Format(words=1, scales=2, ragged_bytes=4),
    "Companded8State": Format(words=2, short_scales=2, ragged_bytes=8, more=1),
    "Int8CompensatedState": Format(words=3, scales=1, ragged_bytes=12, more=2),
    "Int4CompensatedState": Format(words=2, scales=2, ragged_bytes=8, more=2),
    "Companded8CompensatedState": Format(words=3, short_scales=2, ragged_bytes=12, more=2),
    # Unsigned states have scales of rows and columns, so each element has two scales of its own.
    "Int4Rank1State": Format(words=1, scales=2, ragged_bytes=4, more=4),
}
STATES = {
    "Adam<Lanes, false>": 2, "Adam<Lanes, true>": 3, "Sgd<Lanes>": 0, "Momentum<Lanes>": 1, "Lion<Lanes>": 1,
    "Rmsprop<Lanes, false, false>": 1, "Rmsprop<Lanes, false, true>": 2, "Rmsprop<Lanes, true, false>": 2,
    "Rmsprop<Lanes, true, true>": 3, "Adagrad<Lanes>": 1, "Lamb<Lanes>": 2, "Lars<Lanes>": 1,
}
UNSIGNED = [rule for rule in STATES if rule.startswith(("Ad", "Rms", "Lamb"))]


@dataclass
class Bounds:
    blocks: int  # the least number of blocks that must fit on a multiprocessor
    stores: dict  # by width in bits: at least so many of 128 bits, and at most so many of other widths
    loads: dict  # the same for loads


def blocks(rule, form):
    """Four, unless the values that a thread holds between the halves of a step do not fit in 64 registers: three new
    states, two new states and random bits, or two new states and scales of each element."""
    if FORMATS[form].wide or FORMATS[form].halves:
        return 4
    fours = 2 * STATES[rule] + (rule == "Lamb<Lanes>") + FORMATS[form].more
    return 4 if fours <= 5 else 3 if fours <= 9 else 2


def step_stores(states, f):
    """A parameter may be float32, or have 16 bits and a master of float32 or a byte. The code for all of these exists twice,
    for whole tiles and for others. One thread of a block writes its scale."""
    return {
        128: 4 + f.wide * states,
        64: 2 + f.halves * states,
        32: 2 + 8 + 8 + (f.words + 4 * f.wide + 2 * f.scales) * states,
        16: 8 + (4 * f.halves + 2 * f.short_scales) * states,
        8: 8 + f.ragged_bytes * states,
    }


def step_loads(rule, f, states):
    """The gradient, the parameter or its master, and the old states. In addition, at most 20 loads of a byte that holds a dtype
    or a kind, and for momentum twice a load of two such bytes."""
    return {
        128: 4 + f.wide * states,
        16: 16 + (4 * f.halves + 2 * f.short_scales) * states + 2 * (rule in ("Momentum<Lanes>", "Lars<Lanes>")),
        8: 8 + f.ragged_bytes * states + 20,
    }


def every_row():
    rows = {}
    for form, f in FORMATS.items():
        rules = UNSIGNED if form == "Int4Rank1State" else STATES
        for rule in rules:
            rows[f"step_kernel<{rule}, {form}>"] = Bounds(blocks(rule, form), step_stores(STATES[rule], f),
                                                          step_loads(rule, f, STATES[rule]))
        for rule in {"Lamb<Lanes>", "Lars<Lanes>"} & set(rules):
            of_states = 2 if rule == "Lamb<Lanes>" else 0  # LARS is measured without states.
            rows[f"measure_kernel<{rule}, {form}>"] = Bounds(blocks(rule, form), {64: 2}, step_loads(rule, f, of_states))
        for signed in ("false",) if form == "Int4Rank1State" else ("false", "true"):
            rows[f"encode_kernel<{form}, {signed}>"] = Bounds(4, {
                128: f.wide, 64: f.halves, 32: f.words + 4 * f.wide + 2 * f.scales,
                16: 4 * f.halves + 2 * f.short_scales, 8: f.ragged_bytes}, {128: 2, 16: 0, 8: 0})
            rows[f"decode_kernel<{form}, {signed}>"] = Bounds(4, {128: 2, 32: 8}, {
                128: f.wide, 16: 4 * f.halves + 2 * f.short_scales, 8: f.ragged_bytes})
    for rule in UNSIGNED:
        rows[f"survey_kernel<{rule}>"] = Bounds(4, {}, {128: 2})  # The parameter is read only if decay is coupled to it.
    rows["survey_values_kernel"] = Bounds(4, {}, {128: 2})
    rows["settle_kernel"] = Bounds(4, {}, {})
    return rows


@dataclass
class Instruction:
    address: int
    predicate: str
    name: str
    operands: str


@dataclass
class Kernel:
    registers: int
    stack: int
    instructions: list

    def memory(self, *names):
        """Counts the instructions of these names by width in bits."""
        found = Counter()
        for each in self.instructions:
            name, *modifiers = each.name.split(".")
            if name in names:
                width = re.search(r"\b[US]?(8|16|64|128)\b", " ".join(modifiers))
                found[int(width[1]) if width else 32] += 1
        return found


def tool():
    triton = importlib.util.find_spec("triton")  # It comes with torch's CUDA wheels, and contains NVIDIA's tools.
    beside = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton else None
    return shutil.which("cuobjdump") or next(
        (str(path) for path in (Path("/usr/local/cuda/bin/cuobjdump"), beside) if path and path.exists()), None)


def short(name):
    """Returns a demangled kernel's name without namespaces and parameters."""
    name = re.sub(r"reef::kernels::|cuda::|warp::|scalar::|\(anonymous namespace\)::|\(bool\)", "", name)
    name = re.sub(r"\b1>", "true>", re.sub(r"\b0>", "false>", name))
    name = re.sub(r"^void ", "", name.split("(")[0]).replace("> >", ">>")
    return re.sub(r"(Adam<Lanes, \w+), \w+>", r"\1>", name)  # Rules that round like torch share a row with those that do not.


def read_kernels(file):
    def output(*arguments):
        return subprocess.run([tool(), "-arch", ARCHITECTURE, *arguments, str(file)],
                              capture_output=True, text=True, check=True).stdout
    usage = {name: (int(registers), int(stack)) for name, registers, stack in
             re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", output("-res-usage"))}
    bodies = {}
    for part in output("-sass").split("Function : ")[1:]:
        bodies[part.split("\n", 1)[0].strip()] = [
            Instruction(int(address, 16), predicate.strip(), name, operands.strip())
            for address, predicate, name, operands in
            re.findall(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)([^;]*);", part)]
    names = [name for name in bodies if "reef7kernels4cuda" in name and "top_k" not in name]
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return {short(demangled): Kernel(*usage[name], bodies[name])
            for name, demangled in zip(names, plain.splitlines(), strict=True)
            if re.search(r"(step|measure|encode|decode|survey|survey_values|settle)_kernel", demangled)}


@pytest.fixture(scope="module")
def kernels(build_dir):
    if tool() is None:
        pytest.skip("there is no cuobjdump")
    library = next(path for path in build_dir.glob("libreef.so*") if not path.is_symlink())
    listed = subprocess.run([tool(), "-lelf", str(library)], capture_output=True, text=True, check=False).stdout
    if f".{ARCHITECTURE}." not in listed:
        pytest.skip(f"the library is built without CUDA's parts for {ARCHITECTURE}")
    return read_kernels(library)


@pytest.fixture(scope="module")
def rows():
    return every_row()


def expect_none(missed):
    assert not missed, "\n" + "\n".join(f"{name}: {what}" for name, what in missed.items())


def test_every_kernel_has_a_row(kernels, rows):
    expect_none({name: "has no row" for name in kernels.keys() - rows.keys()}
                | {name: "has a row, and is not there" for name in rows.keys() - kernels.keys()})


def test_enough_blocks_fit_a_multiprocessor(kernels, rows):
    most = {name: REGISTERS // THREADS // row.blocks // 8 * 8 for name, row in rows.items()}
    expect_none({name: f"{kernel.registers} registers, where {most[name]} leave room for {rows[name].blocks} blocks"
                 for name, kernel in kernels.items() if kernel.registers > most[name]})


def test_nothing_is_kept_in_memory_for_want_of_a_register(kernels):
    found = {}
    for name, kernel in kernels.items():
        loads, stores = kernel.memory("LDL").total(), kernel.memory("STL").total()
        if kernel.stack or loads or stores:
            found[name] = f"{kernel.stack} bytes of stack, {loads} loads and {stores} stores of it"
    expect_none(found)


def test_memory_is_known_to_be_global(kernels):
    """A load or store with a generic address also waits for earlier accesses to shared memory."""
    found = {name: dict(kernel.memory("LD", "ST", "ATOM")) for name, kernel in kernels.items()}
    expect_none({name: f"bits of loads and stores of any memory, and how many: {count}"
                 for name, count in found.items() if count})


@pytest.mark.parametrize("instruction, bounds", [("LDG", "loads"), ("STG", "stores")])
def test_memory_is_read_and_written_as_wide_as_the_layout_allows(kernels, rows, instruction, bounds):
    missed = {}
    for name, kernel in kernels.items():
        found = kernel.memory(instruction)
        for bits, bound in getattr(rows[name], bounds).items():
            if found[bits] < bound if bits == 128 else found[bits] > bound:
                missed[f"{name}, {bits} bits"] = f"{found[bits]} {bounds}, where {bound} are to be"
    expect_none(missed)


def basic_blocks(instructions):
    """Maps the address at which each basic block begins to the addresses of its successors."""
    def target(each):
        found = re.search(r"0x([0-9a-f]+)$", each.operands)
        return int(found[1], 16) if each.name.split(".")[0] == "BRA" and found else None
    begins = {instructions[0].address} | {target(each) for each in instructions if target(each) is not None}
    after = dict(zip((i.address for i in instructions), (i.address for i in instructions[1:]), strict=False))
    begins |= {after[each.address] for each in instructions
               if each.name.split(".")[0] in ("BRA", "EXIT", "RET") and each.address in after}
    edges, block = {}, None
    for each in instructions:
        if each.address in begins:
            if block is not None and block not in edges:
                edges[block] = [each.address]
            block = each.address
        kind = each.name.split(".")[0]
        if kind in ("BRA", "EXIT", "RET"):
            always = not each.predicate and not re.match(r"!?U?P\w", each.operands) and ".DIV" not in each.name
            goes = [target(each)] if kind == "BRA" and target(each) is not None else []
            edges[block] = goes + ([] if always or each.address not in after else [after[each.address]])
    edges.setdefault(block, [])
    return edges


def loops(edges):
    """Returns the strongly connected components with more than one block, or with one that is its own successor (Tarjan 1972)."""
    index, low, on, stack, found = {}, {}, set(), [], []
    for root in edges:
        work = [(root, iter(edges[root]))] if root not in index else []
        while work:
            block, rest = work[-1]
            if block not in index:
                index[block] = low[block] = len(index)
                stack.append(block)
                on.add(block)
            for successor in rest:
                if successor not in edges:
                    continue
                if successor not in index:
                    work.append((successor, iter(edges[successor])))
                    break
                if successor in on:
                    low[block] = min(low[block], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[block])
                if low[block] == index[block]:
                    part = set(stack[stack.index(block):])
                    del stack[stack.index(block):]
                    on -= part
                    if len(part) > 1 or block in edges[block]:
                        found.append(part)
    return found


def within(edges, loop):
    """Returns the loops inside a loop: those that remain without the block at which it is entered."""
    entry = next(block for source, goes in edges.items() if source not in loop for block in goes if block in loop)
    return loops({block: [to for to in edges[block] if to != entry] for block in loop if block != entry})


def test_the_loop_over_tiles_has_no_loop_in_it(kernels):
    """A block of threads searches once for the tensor of its first piece. Then it loops over tensors, and within a tensor over
    tiles; kernels that measure squares loop over pieces in between."""
    found = {}
    for name, kernel in kernels.items():
        if not name.startswith(("step", "measure", "survey_kernel")):
            continue
        edges = basic_blocks(kernel.instructions)
        votes = {each.address for each in kernel.instructions if each.name.startswith("VOTE")}
        blocks_with_votes = {max(start for start in edges if start <= vote) for vote in votes}
        depth, level = 0, [loop for loop in loops(edges) if loop & blocks_with_votes]
        while level:
            if len(level) > 1:
                found[name] = f"{len(level)} loops beside each other at depth {depth + 1}"
            depth += 1
            level = within(edges, level[0])
        if depth != (3 if name.startswith("measure") else 2):
            found[name] = f"loops {depth} deep"
    expect_none(found)
