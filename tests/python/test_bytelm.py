"""The example program, in C++ and in Python: what it refuses, that it goes on bit for bit, that both faces compute the
same, and what ranks owe to each other."""

import json
import os
import pty
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAM = Path(os.environ.get("REEF_BUILD_DIR", "build")).resolve() / "examples" / "bytelm"
SCRIPT = EXAMPLES / "python" / "bytelm.py"
sys.path[:0] = [str(EXAMPLES / "python"), str(EXAMPLES.parent / "tests" / "support")]

import bytelm  # noqa: E402
import preloaded  # noqa: E402
from ranks import HANG_SECONDS, run_ranks  # noqa: E402

TINY = dict(width=16, depth=2, heads=2, context=16, batch=4, steps=12, threads=1, sample=8, eval_every=5)
FACES = ("cpp", "python")


def arguments(**options):
    """TINY with changes, as a command line; True is a flag, None leaves an option out."""
    line = []
    for name, value in {**TINY, **options}.items():
        if value is None:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        line += [f"--{name.replace('_', '-')}", *map(str, values)]
    return line


def command(face):
    return [str(PROGRAM) if face == "cpp" else str(SCRIPT)]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """run(face, **options): the program in tmp_path, C++ as a process, Python in this one. `limited`: under the limits of
    this process."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def run_face(face, limited=False, **options):
        if face == "python":
            capfd.readouterr()
            returncode = bytelm.main(arguments(**options))
            return SimpleNamespace(returncode=returncode, **capfd.readouterr()._asdict())
        line = [str(PROGRAM), *arguments(**options)]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            if limited:  # SIGXFSZ stays ignored, as it is in Python
                code = subprocess.call(line, stdout=out, stderr=err, timeout=HANG_SECONDS, restore_signals=False)
            else:
                code = preloaded.run(line, dict(os.environ), out, HANG_SECONDS, stderr=err)
            out.seek(0)
            err.seek(0)
            return SimpleNamespace(returncode=code, out=out.read().decode(), err=err.read().decode())

    yield run_face
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of small files whose names sort differently in different hands."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(7)
    for name in ("b.txt", "B.txt", "a/z.txt", "a-b.txt", "é.txt", "a/b/c.txt", "~", "0", "1", "10", "2", ".hidden"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        words = (draw.choice(["the ", "wind ", "fills ", "a ", "sail\n"]) for _ in range(300))
        (folder / name).write_text("".join(words))
    (folder / "a" / "loop").symlink_to(folder, target_is_directory=True)
    return folder


def read_log(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def assert_one_sentence(result, returncode, *words):
    assert result.returncode == returncode, result.err
    assert result.err.startswith("bytelm") and result.err.count("\n") == 1, result.err
    for word in words:
        assert str(word) in result.err
    for trace in ("Traceback", "Exception raised from", "frame #", "terminate called"):
        assert trace not in result.err


# ---- what it refuses ------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    (dict(nonsense=True), "nonsense"),
    (dict(widt=16), "widt"),
    (dict(width="wide"), "width"),
    (dict(width=10**30), "width"),
    (dict(width=10**12), "width"),
    (dict(width=18, heads=4), "heads"),
    (dict(learning_rate=0), "learning-rate"),
    (dict(learning_rate="nan"), "learning-rate"),
    (dict(optimizer="adam"), "adam"),
    (dict(state="int7"), "int7"),
    (dict(stage="all"), "all"),
    (dict(stage=4), "4"),
    (dict(compression="top"), "'top' is none of"),
    (dict(compression="gtopk", density=2), "density 2"),
    (dict(density=0.1), "which compression none does not take"),
    (dict(device="tpu"), "tpu"),
    (dict(device="cuda:"), "cuda:"),
    (dict(device="cuda:99"), "cuda:99"),
    (dict(save_every=5), "--save"),
    (dict(no_ledger=True, chart="x.svg"), "--no-ledger"),
    (dict(seed=-1), "seed"),
    (dict(budget="much"), "much"),
    (dict(recompute_within="much"), "much"),
    (dict(spill="."), "--budget"),
    (dict(budget="1MiB", save="x", save_every=5), "--save-every"),
    (dict(budget="1MiB", device="cuda:99"), "cuda:99"),
    (dict(data=[]), "data"),
    *((dict([(name, 0)]), name.split("_")[0]) for name in TINY if name != "sample"),
]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("options", "word"), BAD_OPTIONS, ids=lambda value: str(value))
def test_bad_option(face, run, options, word):
    assert_one_sentence(run(face, **options), 2, word)


@pytest.mark.parametrize("face", FACES)
def test_bad_text(face, run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("x" * 100)
    assert_one_sentence(run(face, data=["missing"]), 1, "missing")
    assert_one_sentence(run(face, data=["/proc/self/mem"]), 1, "/proc/self/mem")  # opens, but cannot be read
    assert_one_sentence(run(face, data=["empty"]), 2, "empty")
    assert_one_sentence(run(face, data=["short"]), 2, "too short", "17")


@pytest.mark.parametrize("face", FACES)
def test_bad_interpreter(face, run, monkeypatch):
    monkeypatch.setenv("REEF_PYTHON", "/nonexistent/python")
    assert_one_sentence(run(face), 2, "REEF_PYTHON")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("option", ["save", "chart", "trace", "losses"])
def test_file_that_cannot_be_written(face, run, text, option):
    assert_one_sentence(run(face, data=[text], **{option: "/nonexistent/file"}), 1, "/nonexistent/file")


@pytest.mark.parametrize("face", FACES)
def test_bad_checkpoint(face, run, text, tmp_path):
    assert run(face, data=[text], save="good").returncode == 0
    good = (tmp_path / "good").read_bytes()
    draw = random.Random(3)
    damaged = [good[: len(good) * part // 4] for part in range(4)] + [b"a text\n" * 100, good + b"\0"]
    for _ in range(4):
        place = draw.randrange(len(good))
        damaged.append(good[:place] + bytes([good[place] ^ 1 << draw.randrange(8)]) + good[place + 1 :])
    for content in damaged:
        (tmp_path / "bad").write_bytes(content)
        assert_one_sentence(run(face, data=[text], resume="bad"), 1, "bad", "--resume")
    assert_one_sentence(run(face, data=[text], resume="missing"), 1, "missing", "--resume")
    for name, other in dict(width=32, depth=3, heads=4, context=8, optimizer="sgd", state="int8").items():
        assert_one_sentence(run(face, data=[text], resume="good", **{name: other}), 2, "good", f"--{name}")


@pytest.mark.parametrize("face", FACES)
def test_loss_that_is_not_finite(face, run, text):
    result = run(face, data=[text], optimizer="sgd", learning_rate=1e30)
    assert_one_sentence(result, 1, "step ", "bytes.weight", "--learning-rate")


# ---- what it leaves behind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_learns_and_shows_its_memory(face, run, text, tmp_path):
    result = run(face, data=[text], steps=100, losses="log", chart="memory.svg", trace="trace.json", save="model")
    assert result.returncode == 0 and result.err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "memory.svg", "model", "trace.json"]
    *steps, last = read_log("log")
    assert [line["step"] for line in steps] == list(range(1, 101)) and last.keys() == {"parameters_crc32"}
    assert sum(line["loss"] for line in steps[-10:]) < 0.6 * sum(line["loss"] for line in steps[:10])
    bits = [float(number) for number in re.findall(r"validation: (\S+) bits per byte", result.out)]
    assert bits[0] == pytest.approx(8, abs=0.1)  # at first all 256 bytes are alike
    assert bits[-1] < 5
    assert "step 5/100" in result.out and "tokens/s" in result.out and "alive" in result.out
    assert "optimizer state" in result.out and "memory.svg" in result.out
    svg = xml.etree.ElementTree.parse("memory.svg").getroot()
    assert svg.tag.endswith("svg") and any("activation" in (text or "") for text in svg.itertext())
    assert json.loads(Path("trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("face", FACES)
def test_the_ledger_changes_nothing(face, run, text):
    assert run(face, data=[text], losses="with").returncode == 0
    result = run(face, data=[text], losses="without", no_ledger=True)
    assert result.returncode == 0 and "alive" not in result.out
    assert read_log("with") == read_log("without")


def test_bar_on_a_terminal_only(text, tmp_path):
    ours, theirs = pty.openpty()
    line = [str(PROGRAM), *arguments(data=[text])]
    result = subprocess.run(line, stdout=subprocess.PIPE, stderr=theirs, cwd=tmp_path, timeout=HANG_SECONDS)
    os.close(theirs)
    drawn = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert result.returncode == 0
    assert "/12 " in drawn and "tokens/s" in drawn and "left" in drawn and drawn.endswith("\r\033[K")
    assert b"\r" not in result.stdout


@pytest.mark.parametrize("face", FACES)
def test_checkpoint_is_written_whole_or_not_at_all(face, run, text, tmp_path):
    assert run(face, data=[text], save="model", no_ledger=True).returncode == 0
    before = (tmp_path / "model").read_bytes()

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, unlimited[1]))  # the next write beyond fails
    try:
        result = run(face, limited=True, data=[text], save="model", no_ledger=True, seed=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert_one_sentence(result, 1, "model", "room")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model").read_bytes() == before


# ---- going on -------------------------------------------------------------------------------------------------------

# Wide enough that states are quantized.
OPTIMIZERS = {
    "adamw": dict(optimizer="adamw"),
    "sgd": dict(optimizer="sgd"),
    "adamw int8": dict(optimizer="adamw", state="int8", width=64),
    "sgd companded8": dict(optimizer="sgd", state="companded8", width=64),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_run_equals_uninterrupted_run(run, text, optimizer, tmp_path):
    options = dict(data=[text], steps=200, eval_every=200, sample=0, **OPTIMIZERS[optimizer])
    assert run("cpp", losses="whole", **options).returncode == 0
    process = subprocess.Popen(
        [str(PROGRAM), *arguments(save="model", save_every=10, **options)], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + HANG_SECONDS
    while not (tmp_path / "model").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert run("cpp", losses="rest", resume="model", **options).returncode == 0
    whole, rest = read_log("whole"), read_log("rest")
    assert whole[-len(rest) :] == rest and (rest[0]["step"] - 1) % 10 == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_python_run_equals_uninterrupted_run(run, text, optimizer, monkeypatch):
    options = dict(data=[text], **OPTIMIZERS[optimizer])
    assert run("python", losses="whole", **options).returncode == 0

    def save_and_fail(*state):
        save_checkpoint(*state)
        raise RuntimeError("stopped")

    save_checkpoint = bytelm.save_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(bytelm, "save_checkpoint", save_and_fail)
        assert run("python", save="model", save_every=7, **options).returncode == 1
    assert run("python", losses="rest", resume="model", **options).returncode == 0
    assert read_log("rest") == read_log("whole")[7:]


# ---- two faces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_cpp_and_python_compute_the_same(run, text, optimizer):
    results = [run(face, data=[text], losses=face, **OPTIMIZERS[optimizer]) for face in FACES]
    assert [result.returncode for result in results] == [0, 0]
    cpp, python = (read_log(face) for face in FACES)
    if optimizer != "adamw":
        assert cpp == python
    else:  # LibTorch's C++ AdamW orders its operations otherwise than Python's
        assert [line["loss"] for line in cpp[:-1]] == pytest.approx([line["loss"] for line in python[:-1]], abs=1e-4)


def test_cpp_and_python_write_the_same(run, text):
    told = [run(face, data=[text], optimizer="sgd", eval_every=100, no_ledger=True).out for face in FACES]
    assert told[0] == told[1]


def test_the_text_is_the_standard_library_by_default(run):
    first_lines = [run(face, steps=1, no_ledger=True).out.splitlines()[0] for face in FACES]
    assert first_lines[0] == first_lines[1]
    assert int(first_lines[0].split()[1]) > 300  # files


# ---- ranks ----------------------------------------------------------------------------------------------------------


def run_two(line):
    return run_ranks([str(word) for word in line], ranks=2)


@pytest.mark.parametrize("face", FACES)
def test_two_ranks_stay_equal_and_equal_one_of_twice_the_batch(face, run, text):
    result = run_two(command(face) + arguments(data=[text], batch=2, losses="two", optimizer="sgd"))
    assert result.ok, result.report()
    assert "validation: " in result.ranks[0].output and result.ranks[1].output == ""
    assert read_log("two") == read_log("two.rank1")
    assert run(face, data=[text], batch=4, losses="one", optimizer="sgd").returncode == 0
    losses = [[line["loss"] for line in read_log(name)[:-1]] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize(("ranks", "density"), [(2, 0.05), (2, 0.001), (4, 0.001), (8, 0.001)])
def test_ranks_that_send_less_are_alike_in_both_languages(run, text, ranks, density):
    def losses(face, **more):
        log = f"{face}.{len(more)}"
        line = command(face) + arguments(data=[text], batch=2, losses=log, optimizer="sgd", threads=1, sample=0, **more)
        result = run_ranks([str(word) for word in line], ranks=ranks)
        assert result.ok, result.report()
        assert all(read_log(log) == read_log(f"{log}.rank{rank}") for rank in range(1, ranks))
        return [line["loss"] for line in read_log(log)[:-1]]

    sent = {face: losses(face, compression="gtopk", density=density) for face in FACES}
    assert sent["cpp"] == pytest.approx(sent["python"], abs=1e-5)
    assert sent["cpp"] != losses("cpp")


@pytest.mark.parametrize("face", FACES)
def test_ranks_that_divide_compute_the_same_and_go_on_from_each_others_checkpoints(face, run, text):
    stages = ("replicate", "optimizer", "gradients", "parameters") if face == "cpp" else ("replicate", "parameters")
    options = dict(data=[text], batch=2, state="int8", sample=0)

    def two(**more):
        result = run_two(command(face) + arguments(**options, **more))
        assert result.ok, result.report()

    for stage in stages:
        given = stages.index(stage) if len(stages) == 4 else stage  # by number, too
        two(stage=given, save=f"{stage}.model", losses=stage)
        assert read_log(stage) == read_log(f"{stage}.rank1") == read_log("replicate"), stage
    for stage, next_stage in zip(stages, stages[1:] + stages[:1], strict=True):
        two(stage=next_stage, resume=f"{stage}.model", steps=18, losses=f"{stage}.rest")
        assert read_log(f"{stage}.rest") == read_log("replicate.rest"), (stage, next_stage)
        alone = {**options, "resume": f"{stage}.model", "steps": 15}
        assert run(face, losses=f"{stage}.alone", **alone).returncode == 0
        assert read_log(f"{stage}.alone") == read_log("replicate.alone"), stage


def test_a_model_that_is_cut_over_ranks_is_one_model(run, text):
    options = dict(data=[text], optimizer="sgd", sample=6, pipeline=2, batch=4)
    shapes = {"cpp": dict(ranks=2, schedule="1f1b"), "python": dict(ranks=3, schedule="1f1b"), "three": dict(ranks=3, schedule="zero_bubble", stage=1)}

    def cut(name, *, ranks, **more):
        face = "python" if name.startswith("python") else "cpp"
        result = run_ranks([str(word) for word in command(face) + arguments(**{**options, **more})], ranks=ranks)
        assert result.ok, result.report()
        return [line for line in result.ranks[0].output.splitlines() if line.startswith(("sample", "validation"))]

    # The embedding is the head once more, so where both are on ranks of their own its gradients are added up alike.
    told = {name: cut(name, losses=name, save=f"{name}.model", depth=3, **shape) for name, shape in shapes.items()}
    for name in shapes:
        assert read_log(name) == read_log(f"{name}.rank1") == read_log("cpp"), name
        assert told[name] == told["cpp"], name
    # Each goes on as one process, from a checkpoint of the same language.
    alone = dict(data=[text], optimizer="sgd", sample=0, batch=4, depth=3)
    for face in FACES:
        assert run(face, resume=f"{face}.model", losses=f"{face}.alone", **{**alone, "steps": 15}).returncode == 0
        assert run(face, save=f"{face}.one", **alone).returncode == 0
        cut(f"{face}.on", resume=f"{face}.one", losses=f"{face}.on", depth=3, steps=15, **shapes[face])
        again = dict(shapes["three"], schedule="zbv", ranks=1) if face == "cpp" else dict(ranks=2, replicas=2)
        cut(f"{face}.again", resume=f"{face}.model", depth=3, steps=14, **again)
    assert read_log("cpp.alone") == read_log("python.alone")
    assert read_log("cpp.on") == read_log("python.on")


@pytest.mark.parametrize(("given", "words"), [
    (dict(schedule="1f1b"), "--pipeline COUNT"), (dict(replicas=2), "--pipeline COUNT"),
    (dict(pipeline=3), "make it a multiple"), (dict(pipeline=2, recompute_within="1MiB"), "--recompute-within"),
    (dict(pipeline=2, compression="bfloat16"), "--compression"), (dict(pipeline=129, batch=129), "128"), (dict(pipeline=2, schedule="none"), "gpipe"),
])  # fmt: skip
@pytest.mark.parametrize("face", FACES)
def test_a_pipeline_that_cannot_be(face, run, text, given, words):
    result = run(face, data=[text], **given)
    assert result.returncode == 2 and words in result.err, result.err


def test_rank_that_dies_is_named(run, text):
    rank_1_dies_in_step_4 = """
        [ $RANK = 1 ] && (until [ "$(wc -l <log.rank1)" -gt 3 ]; do sleep 0.05; done; kill -9 $$) 2>/dev/null &
        exec "$@"
    """
    line = command("cpp") + arguments(data=[text], steps=1000000, eval_every=1000000, losses="log")
    survivor, dead = run_two(["sh", "-c", rank_1_dies_in_step_4, "sh", *line]).ranks
    assert dead.signal == signal.SIGKILL and dead.stopped_by is None
    assert survivor.exit_code == 1
    said = survivor.output.splitlines()[-1]
    assert said.startswith("bytelm: rank 0: ") and "rank 1" in said


def test_rank_that_fails_says_which_it_is(run, text):
    for rank in run_two(command("cpp") + arguments(data=["missing"])).ranks:
        assert rank.exit_code == 1
        assert f"bytelm: rank {rank.rank}: " in rank.output


# ---- inside a budget ------------------------------------------------------------------------------------------------


def tensors_of(checkpoint):
    """Size and checksum of each tensor's bytes; their order is that of addresses, which no two runs share."""
    with zipfile.ZipFile(checkpoint) as archive:
        return sorted((e.file_size, e.CRC) for e in archive.infolist() if Path(e.filename).parent.name == "data")


@pytest.mark.parametrize("spill", [None, "."])
@pytest.mark.parametrize("face", FACES)
def test_a_budget_changes_no_bit(face, run, text, spill):
    options = dict(data=[text], width=32, context=32, steps=8)
    assert run(face, losses="plain", summary="plain.json", save="a", **options).returncode == 0
    peak = json.loads(Path("plain.json").read_text())["peak_bytes"]
    inside = run(face, losses="inside", summary="inside.json", save="b", budget=peak // 2, spill=spill, **options)
    assert inside.returncode == 0, inside.err
    assert "pages that left" in inside.out
    assert json.loads(Path("inside.json").read_text())["peak_bytes"] <= peak // 2
    assert Path("inside").read_text() == Path("plain").read_text()
    assert tensors_of("b") == tensors_of("a")


@pytest.mark.parametrize("face", FACES)
def test_a_budget_too_small_is_one_sentence(face, run, text):
    assert_one_sentence(run(face, data=[text], budget=1000), 1, "out of memory", "give at least")


# ---- with activations computed once more ----------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_recomputing_changes_no_bit(face, run, text):
    options = dict(data=[text], width=32, depth=6, context=32, batch=32, steps=4)
    assert run(face, losses="plain", summary="plain.json", save="a", **options).returncode == 0
    few = run(face, losses="few", summary="few.json", save="b", recompute_within="4MiB", **options)
    assert few.returncode == 0, few.err
    assert "blocks: 6 stages within 4.00 MiB" in few.out
    assert Path("few").read_text() == Path("plain").read_text()
    assert tensors_of("b") == tensors_of("a")
    peaks = [json.loads(Path(f"{name}.json").read_text())["peak_bytes"] for name in ("plain", "few")]
    assert peaks[1] < 0.8 * peaks[0], peaks
    assert_one_sentence(run(face, recompute_within=1000, **options), 1, "out of memory", "smallest peak")


@pytest.mark.parametrize("face", FACES)
def test_ranks_recompute_alike(face, run, text):
    options = dict(data=[text], width=32, depth=4, context=32, batch=16, steps=3, stage="parameters")
    for name, more in (("plain", {}), ("few", dict(recompute_within="3MiB"))):
        result = run_two(command(face) + arguments(losses=name, **options, **more))
        assert result.ok, result.report()
    assert Path("few").read_text() == Path("plain").read_text()
