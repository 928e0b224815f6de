"""The import layers: a package imports only from the packages listed for it, and nothing in a circle."""

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: What each package may import besides itself, from the lowest layer to the highest: the table of docs/architecture.md.
#: A module of ece408_op itself, and core.dispatch, which alone in core imports the kernels, counts as a package.
ROWS = re.findall(
    r"^\| `([\w.]+)` \| [^|]+ \| ([^|]*) \|$", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.MULTILINE
)
MAY_IMPORT = {name: re.findall(r"`([\w.]+)`", others) for name, others in ROWS}
#: Modules that call CUDA streams; all others only pass one on.
KNOW_STREAMS = {"cuda", "bridge", "device_context", "host_context", "engine", "batch"}


def modules() -> dict[str, Path]:
    """{"ece408_op.x": path} of every file of the package; a folder's __init__ has the folder's name."""
    found = {}
    for folder in ("ece408_op", "kernels", "models", "data"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "ece408_op" else ("ece408_op", *parts))
            found[name.replace(".__init__", "")] = path
    return found


MODULES = modules()


def package(name: str) -> str:
    """The entry of MAY_IMPORT that a module belongs to."""
    name = name.partition(".")[2]
    return name if name in MAY_IMPORT else name.partition(".")[0] or "__init__"


def imports(name: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The full names that nodes of a file import; a name that is no module counts as its module."""
    above = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = above[: len(above) + 1 - node.level] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in MODULES else base


@pytest.fixture(scope="module")
def trees():
    """The modules' syntax trees."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


@pytest.fixture(scope="module")
def own(trees):
    """The modules of the package that each file imports, inside its functions too."""
    return {name: {*imports(name, ast.walk(tree))} & {*MODULES} - {name} for name, tree in trees.items()}


def test_every_file_belongs_to_a_package():
    assert [name for name in MODULES if package(name) not in MAY_IMPORT] == []


def test_a_package_may_import_lower_ones_only():
    assert len(MAY_IMPORT) == len(ROWS) > 10
    order = list(MAY_IMPORT)
    for number, (name, others) in enumerate(MAY_IMPORT.items()):
        assert set(others) <= set(order[:number]), name


def test_imports_come_from_the_packages_listed(own):
    edges = [(name, other) for name in MODULES for other in own[name] if package(other) != package(name)]
    assert [edge for edge in edges if package(edge[1]) not in MAY_IMPORT[package(edge[0])]] == []


def test_nothing_listed_is_unused(own):
    used = {(package(name), package(other)) for name in MODULES for other in own[name]}
    assert [(name, x) for name, others in MAY_IMPORT.items() for x in others if (name, x) not in used] == []


def test_a_private_module_is_imported_in_its_folder_only(own):
    for name in MODULES:
        private = [other for other in own[name] if other.rpartition(".")[2].startswith("_")]
        outside = [x for x in private if MODULES[x].parent != MODULES[name].parent]
        assert outside == [], name


def test_a_package_names_its_public_modules(trees):
    for name, path in MODULES.items():
        stem = name.rpartition(".")[2]
        inner = path.name != "__init__.py" and path.parent != ROOT / "ece408_op"
        # A kernel needs its file and its line in KERNELS alone.
        if inner and package(name) != "kernels" and not stem.startswith("_"):
            text = ast.get_docstring(trees[name.rpartition(".")[0]])
            assert re.search(rf"\b{stem}\b", text or ""), f"{path.parent.name} does not name {stem}"


def test_nothing_imports_in_a_circle(own):
    TopologicalSorter(own).prepare()


def test_importing_a_low_layer_loads_neither_mxnet_nor_cupy(trees):
    for name, tree in trees.items():
        loaded = {other.split(".")[0] for other in imports(name, tree.body)}
        assert "cupy" not in loaded, name
        if package(name) in ("errors", "problem", "commands", "data", "runtime", "core", "kernels", "core.dispatch"):
            assert "mxnet" not in loaded, name


def test_kernels_never_name_mxnet():
    sources = [path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    assert sources
    assert [path.name for path in sources if re.search("mxnet", path.read_text(encoding="utf-8"), re.IGNORECASE)] == []


def test_only_few_files_know_streams(trees):
    calls = {"Stream", "synchronize", "wait_event", "ExternalStream"}
    for name in MODULES:
        if name.split(".")[-1].lstrip("_") not in KNOW_STREAMS:
            called = {node.attr for node in ast.walk(trees[name]) if isinstance(node, ast.Attribute)}
            assert calls.isdisjoint(called), name
