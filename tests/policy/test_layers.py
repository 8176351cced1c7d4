"""Include direction: a file includes only its own layer or a lower one (docs/design.md).

0  pure        standard library, Boost and c10's exceptions; nothing that needs a tensor
1  mechanism   Torch
2  capability  never include each other, but for BUILT_OF
3  face        torch_ext, examples: public headers only
"""

import re
from pathlib import Path

LAYER_0 = {
    "include/reef/async_updates.h", "include/reef/bytes.h", "include/reef/category.h", "include/reef/compression.h", "include/reef/chain_profile.h", "include/reef/chain_solver.h", "include/reef/error.h", "include/reef/export.h",
    "include/reef/link.h", "include/reef/pipeline_generator.h", "include/reef/pipeline_partition.h", "include/reef/pipeline_schedule.h", "include/reef/pipeline_simulation.h", "include/reef/pipeline_versions.h", "include/reef/plan_pipeline.h", "include/reef/price_exchange.h", "include/reef/rendezvous.h", "include/reef/schedule.h", "include/reef/shard_layout.h", "include/reef/swap.h", "include/reef/timeline.h", "include/reef/trace.h",
    "csrc/bytes.cpp", "csrc/category.cpp", "csrc/error.cpp", "csrc/factor_rank.h", "csrc/kernels/packed_levels.h", "csrc/gather_order.cpp", "csrc/gather_order.h", "csrc/gathered_room.cpp", "csrc/gathered_room.h", "csrc/high_water.h", "csrc/json.cpp", "csrc/json.h", "csrc/json_members.cpp", "csrc/json_members.h", "csrc/round_up.h", "csrc/utf8.h",
    "csrc/distributed/call_order.cpp", "csrc/distributed/call_order.h", "csrc/distributed/link.cpp", "csrc/distributed/rendezvous.cpp", "csrc/distributed/slice_chunks.h", "csrc/distributed/price_exchange.cpp", "csrc/shard_layout.cpp", "csrc/trace.cpp",
}  # fmt: skip
LAYER_0_FOLDERS = {"csrc/async_updates", "csrc/chain", "csrc/pipeline", "csrc/swap", "csrc/timeline"}
CAPABILITIES = {"budget", "checkpoint", "optim", "parameter_server", "pipeline_run", "shard"}
PARTS = {"chain": "checkpoint", "gradient_release": "optim", "optimizer_state": "shard", "ddp_hook": "shard", "delayed_update": "shard", "local_updates": "shard", "measure_exchange_work": "shard", "measure_pipeline": "pipeline_run", "pipeline": "pipeline_run"}  # headers beside their capability's own
BUILT_OF = {"pipeline_run": {"checkpoint", "shard"}}  # chunks may be recomputed, and ranks that have the same ones keep them as a Shard
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def capability(path: str) -> str | None:
    """The capability that the file belongs to: csrc/<it>/ and include/reef/<it>.h."""
    if path.startswith("include/reef/"):
        name = PARTS.get(Path(path).stem, Path(path).stem)
    else:
        name = Path(path).parent.name
    return name if name in CAPABILITIES else None


def layer(path: str) -> int:
    if path.startswith(("torch_ext/", "examples/", "benchmarks/")) or path == "include/reef/reef.h":
        return 3
    if capability(path):
        return 2
    return 0 if path in LAYER_0 or str(Path(path).parent) in LAYER_0_FOLDERS else 1


def included(root: Path, path: Path):
    for quote, name in INCLUDE.findall(path.read_text()):
        if name.startswith("reef/"):
            yield quote, name, f"include/{name}"
        elif quote == '"' and (path.parent / name).exists():
            yield quote, name, str((path.parent / name).relative_to(root))
        elif quote == '"':
            yield quote, name, f"csrc/{name}"
        else:
            yield quote, name, None


def sources(root: Path, *folders: str):
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".h", ".cpp", ".cu", ".cuh"} and "gloo_shim" not in path.parts:
                yield path


def test_listed_files_exist(root):
    assert [name for name in LAYER_0 if not (root / name).exists()] == []


def test_includes_go_down(root):
    wrong = []
    for path in sources(root, "include", "csrc"):
        own = str(path.relative_to(root))
        for quote, name, target in included(root, path):
            if target is not None and (root / target).exists() and layer(target) > layer(own):
                wrong.append(f"{own} includes {name}")
            if target is not None and capability(own) and capability(target) not in {None, capability(own), *BUILT_OF.get(capability(own), ())}:
                wrong.append(f"{own}, a capability, includes another: {name}")
            if layer(own) == 0 and target is None and name.startswith(("ATen/", "torch/", "c10/")):
                if name != "c10/util/Exception.h":
                    wrong.append(f"{own} is pure but includes {name}")
    assert wrong == []


def test_public_headers_include_public_headers_only(root):
    wrong = [f"{path.name} includes {name}" for path in sources(root, "include")
             for quote, name, _ in included(root, path) if quote == '"' and not name.startswith("reef/")]
    assert wrong == []


def test_faces_reach_the_library_by_its_public_headers(root):
    wrong = [f"{path.relative_to(root)} includes {name}" for path in sources(root, "torch_ext", "examples")
             for _, name, target in included(root, path)
             if target is not None and target.startswith("csrc/") and (root / target).exists()]
    assert wrong == []


def test_no_torch_header_in_device_code(root):
    wrong = [f"{path.name} includes {name}" for path in sources(root, "csrc") if path.suffix in {".cu", ".cuh"}
             for _, name, _ in included(root, path) if name.startswith(("ATen/", "torch/", "c10/"))]
    assert wrong == []


def test_what_differs_between_torch_versions_is_in_one_header(root):
    wrong = [str(path.relative_to(root)) for path in sources(root, "include", "csrc", "torch_ext", "examples")
             if "TORCH_VERSION" in path.read_text() and path.name not in {"compat.h", "build_info.cpp"}]
    assert wrong == []
