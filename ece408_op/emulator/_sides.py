"""Which functions and variables of a CUDA file are the host's alone: nvcc compiles no kernel that uses them.

For g++, ``__device__`` means nothing. So the text is searched for names of the file's own; what is not clearly wrong
passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ece408_op.runtime.source_text import mask

from ._errors import CompileError

_CUDA = Path(__file__).parent / "cuda"
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\[^\n]|\\\n)*", re.MULTILINE)
#: Braces behind these words hold declarations of the file's own level.
_TRANSPARENT = re.compile(r'\bnamespace\b[\w\s:]*\Z|\bextern\s+(?:"C"|   )\s*\Z')
_SPACES = re.compile(r"__(?:global|device|constant|shared|managed)__")
#: Declarations that are no functions and variables, or that kernels may use: a constant's value is the compiler's.
_NEITHER = re.compile(
    r"\b(?:typedef|using|struct|class|union|enum|static_assert|friend|operator|const|constexpr|extern)\b"
)
_FUNCTION = re.compile(r"([A-Za-z_]\w*)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*(?:noexcept\s*)?\Z")
_VARIABLE = re.compile(r"[\w>*&]\s*[\s*&]\s*([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*(?:=.*)?\Z", re.DOTALL)
#: In front of a name that is used, not declared.
_USES = r"(?:return|else|case|goto|new|delete|throw|sizeof|do|and|or|not)"


def check(text: str) -> None:
    """Raise CompileError where a kernel or a device function uses a function or a variable of the host's."""
    masked = _DIRECTIVE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), mask(text))
    functions, variables, ours = set(), set(), set()
    bodies: list[tuple[str, int, str]] = []
    for head, begin, body in _declarations(masked):
        function = _FUNCTION.search(head) if body else None
        if _SPACES.search(head):
            ours.add(function[1] if function else "")
            if function and "__host__" not in head:
                bodies.append((head, begin, body))
        elif _NEITHER.search(head.partition("(")[0]):
            continue
        elif function:
            functions.add(function[1])
        elif not body and "(" not in head.partition("=")[0]:
            variables |= {found[1] for found in [_VARIABLE.search(head)] if found}
    for head, begin, body in bodies:
        name = _FUNCTION.search(head)[1]  # type: ignore[index]
        for other in sorted(functions - ours - _known()):
            for found in re.finditer(rf"(?<![\w.>])(?:\w+\s*::\s*)*{other}\s*(?:<[^;(){{}}]*>\s*)?\(", body):
                if not _declared(other, head, body):
                    said = f'calling a __host__ function("{other}") from a __global__ or __device__ function("{name}")'
                    _fail(text, begin + found.start(), f"{said} is not allowed: it lacks __device__")
        for other in sorted(variables):
            used = re.search(rf"(?<![\w.>:]){other}\b", body)
            if used and not _declared(other, head, body):
                said = f'identifier "{other}" is undefined in device code ("{name}")'
                _fail(text, begin + used.start(), f"{said}: it is a variable of the host's")


def _fail(text: str, at: int, message: str) -> None:
    raise CompileError(((text.count("\n", 0, at) + 1, message),))


def _declared(name: str, head: str, body: str) -> bool:
    """May the function declare that name itself, as a parameter or a variable?"""
    first = (
        rf"(?:\A|[;{{}}(,])\s*(?!{_USES}\b)(?:[A-Za-z_][\w:]*(?:<[^;{{}}()]*>)?\s+)*[A-Za-z_][\w:]*(?:<[^;{{}}()]*>)?"
    )
    declaration = rf"{first}(?:\s+|\s*[*&]+\s*)(?:const\s+|__restrict__\s+)*{name}\s*[=;,:)\[({{]"
    another = rf",\s*[*&]*{name}\s*(?:=[^=]|;|,|\[)"
    parameters = head[head.find("(") :]
    return any(re.search(one, text) for one in (declaration, another) for text in (parameters, body))


def _declarations(masked: str) -> Iterator[tuple[str, int, str]]:
    """Yield the file's declarations outside of classes and functions.

    Each is the text in front of its body or ``;``, where that ends, and the body, empty if there is none.
    """
    start, i = 0, 0
    while i < len(masked):
        letter = masked[i]
        if letter in ";}":
            yield masked[start:i], i, ""
            start = i + 1
        elif letter == "{":
            head = masked[start:i]
            if _TRANSPARENT.search(head):
                start = i + 1
            else:
                end = _closing(masked, i)
                if "=" in head and not _FUNCTION.search(head):  # an initialiser
                    i = end
                    continue
                yield head, i, masked[i : end + 1]
                start, i = end + 1, end
        i += 1


def _closing(masked: str, at: int) -> int:
    depth = 0
    for found in re.compile(r"[{}]").finditer(masked, at):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return found.start()
    return len(masked) - 1


@cache
def _known() -> frozenset[str]:
    """Names of functions that CUDA has too."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(_CUDA.glob("*.h")))
    return frozenset(re.findall(r"\b([A-Za-z_]\w*)\s*\(", text)) | {"max", "min", "abs"}
