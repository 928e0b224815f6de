"""The house: a file imports only from its own floor and those below it, and nothing in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Each file of the package stands on one floor; a folder's name stands for its files.
FLOORS = {
    0: "commands install_hint errors timing problem mxnet_import mxnet_lent llvm memory parallel process_usage data",
    1: "kernel launch cuda cuda_launch staging choices floors kept_memory",
    2: "kernels",
    3: "dispatch check call_record bridge plain_layout",
    4: "at_once attributes bench builder connect cpu_context device_context fresh_outputs host_context mxnet_errors "
    "operator graph graph_fuse graph_json graph_nodes graph_params graph_replace models inference grade profile "
    "network report sweep",
    5: "bench_contexts bench_network kernel_table milestones __init__ __main__",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}
#: What has to do with streams; all others are given one at most to pass on.
KNOW_STREAMS = {"cuda", "bridge", "device_context", "host_context", "engine"}


def modules() -> dict[str, Path]:
    """{"ece408_op.x": path} of every file of the package; a folder's __init__ bears the folder's name."""
    found = {}
    for folder in ("ece408_op", "kernels", "models", "data"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "ece408_op" else ("ece408_op", *parts))
            found[name.replace(".__init__", "")] = path
    return found


MODULES = modules()


def floor(name: str) -> int | None:
    return FLOOR_OF.get(name.split(".")[1] if "." in name else "__init__")


def imports(name: str, top_only: bool = False) -> Iterator[str]:
    """The full names that a file imports, inside its functions too; what is no module counts as its module."""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in MODULES else base


def test_every_file_has_a_floor() -> None:
    assert [name for name in MODULES if floor(name) is None] == []


@pytest.mark.parametrize("name", MODULES)
def test_imports_come_from_no_higher_floor(name: str) -> None:
    own = [other for other in imports(name) if other in MODULES]
    assert [other for other in own if floor(other) > floor(name)] == []


def test_nothing_imports_in_a_circle() -> None:
    edges = {name: {other for other in imports(name) if other in MODULES and other != name} for name in MODULES}
    done = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, [*path, name])
            done.add(name)

    for name in edges:
        visit(name, [])


@pytest.mark.parametrize("name", MODULES)
def test_importing_a_file_of_a_low_floor_loads_neither_mxnet_nor_cupy(name: str) -> None:
    loaded = {other.split(".")[0] for other in imports(name, top_only=True)}
    assert "cupy" not in loaded
    if floor(name) <= FLOOR_OF["kernels"]:
        assert "mxnet" not in loaded


def test_kernels_never_name_mxnet() -> None:
    sources = [path for path in (ROOT / "kernels").iterdir() if path.suffix in (".py", ".cu", ".cuh")]
    assert sources
    assert [path.name for path in sources if re.search("mxnet", path.read_text(encoding="utf-8"), re.IGNORECASE)] == []


def test_the_operator_never_names_cupy() -> None:
    assert not re.search("import.*cupy", MODULES["ece408_op.operator"].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[-1] not in KNOW_STREAMS])
def test_only_few_files_know_streams(name: str) -> None:
    nodes = ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    calls = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    assert {"Stream", "synchronize", "wait_event", "ExternalStream"}.isdisjoint(calls)
