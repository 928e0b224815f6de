"""Tests use the product's public names: they neither patch nor read a private name of one of its modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = [path for path in sorted(TESTS.rglob("*.py")) if "submissions" not in path.parts]
#: Methods of pytest's monkeypatch, and of unittest.mock's patch.
PATCHES = {"setattr", "delattr", "patch", "object"}


def is_private(name: object) -> bool:
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    return last.startswith("_") and not last.endswith("__")


def private_uses(source: str) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    own = {alias.asname or alias.name for node in imports for alias in node.names if "ece408_op" in ast.unparse(node)}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PATCHES:
            texts = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            used = any(map(is_private, texts))
        else:
            used = isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in own
        if used:
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("monkeypatch.setattr(cuda, '_name', 1)", True),
        ("monkeypatch.setattr('ece408_op.runtime.cuda._name', 1)", True),
        ("mock.patch.object(cuda, '_name')", True),
        ("cuda._name.cache_clear()", True),
        ("monkeypatch.setattr(cuda, 'name', '_value')", False),
        ("self._name = cuda.__name__", False),
    ],
)
def test_private_names_are_found(line, found):
    assert bool(list(private_uses(f"from ece408_op.runtime import cuda\n{line}"))) == found


def test_no_test_uses_a_private_name_of_the_product():
    assert len(FILES) > 100
    uses = [f"{path.relative_to(TESTS)}:{use}" for path in FILES for use in private_uses(path.read_text("utf-8"))]
    assert uses == [], "give the product a public name for it, or test what a caller sees:\n" + "\n".join(uses)
