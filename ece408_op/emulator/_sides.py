"""Which functions and variables of a CUDA file are the host's alone: nvcc compiles no kernel that uses them.

For g++, ``__device__`` means nothing. So this module searches the text for the file's own names, and lets pass every
use that is not clearly wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from ece408_op.runtime.source_text import mask

from ._errors import CompileError, UnsupportedCodeError
from ._rewrite import CUDA, closing

_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\[^\n]|\\\n)*", re.MULTILINE)
#: Braces behind these words hold declarations of the file's own level.
_TRANSPARENT = re.compile(r'\bnamespace\b[\w\s:]*\Z|\bextern\s+(?:"C"|   )\s*\Z')
_SPACES = re.compile(r"__(?:global|device|constant|shared|managed)__")
#: Declarations that are no functions and variables, or of types that the emulator lacks.
_NEITHER = re.compile(
    r"\b(?:typedef|using|namespace|struct|class|union|enum|static_assert|friend|operator|extern|texture|surface)\b"
)
#: A constant's value is the compiler's, but not an array's elements.
_CONSTANT = re.compile(r"\bconst(?:expr)?\b")
#: In front of a function's parameters: maybe a macro that stands for __device__.
_MACRO = re.compile(r"\A[^(]*\b[A-Z][A-Z0-9_]+\b")
_CLASS = re.compile(r"\A[^(]*\b(?:struct|class)\b[^(]*\Z")
_FUNCTION = re.compile(r"([A-Za-z_]\w*)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*(?:const\s*)?(?:noexcept\s*)?\Z")
_VARIABLE = re.compile(r"[\w>*&]\s*[\s*&]\s*([A-Za-z_]\w*)\s*((?:\[[^\]]*\]\s*)*)(?:=.*)?\Z", re.DOTALL)
#: In front of a name that is used, not declared.
_USES = r"(?:return|else|case|goto|new|delete|throw|sizeof|do|and|or|not)"
#: Names of libraries for the host, as nvcc 13 judges: it has the mathematical functions of std.
_LIBRARY = re.compile(
    r"(?<![\w.>:])(?:(?:::\s*)?std\s*::\s*(max|min|clamp|swap|fill|fill_n|copy|accumulate|inner_product|sort|array|vector|map"
    r"|string|tuple|pair|function|cout|cerr|endl)\b"
    r"|(rand|srand|exit|puts|putchar|fprintf|sprintf|abort|time|usleep|sleep|getenv|omp_\w+|CHECK(?:_[A-Z]{2})?|LOG)\s*\()"
)
#: A lambda for the GPU, behind its captures.
_LAMBDA = re.compile(r"(?<!\])\]\s*__(?:host|device)__\b")
_ALLOCATES = re.compile(r"(?<![\w.>:])(malloc|calloc)\s*\(|\b(new)\s+[A-Za-z_]")
_SHARED_VALUE = re.compile(r"\b__shared__\b(?:[^;={}[]|\[[^]]*\])*=")
#: What the compiler computes: a part of a constant, or the size of an array that is declared.
_COMPUTED = re.compile(
    r"(?:\A|[;{}])\s*(?:[^;{}]*\bconstexpr\b[^;{}]*|(?:\w+\s+)+\w+\s*(?:\[[^\]]*\]\s*)*\[[^\];{}]*)\Z"
)


def check(text: str) -> None:
    """Raise CompileError for the first use, in a kernel or a device function, of what only the host has.

    Also for what else nvcc refuses and g++ does not: a ``__shared__`` variable with an initializer, a ``__device__``
    variable in a function, a kernel that returns a value, and a call of a kernel without ``<<<...>>>``. And
    UnsupportedCodeError where one allocates memory or has a reference as a parameter, which the emulator lacks.
    """
    masked = _without_directives(text)
    annotated = _LAMBDA.search(masked)
    if annotated:
        said = "__host__ or __device__ annotation on lambda requires --extended-lambda nvcc flag, which is not set"
        raise _error(text, annotated.end(), said)
    functions: set[str] = set()  # with a point in front of those of classes
    variables: set[str] = set()
    ours: set[str] = set()
    kernels: set[str] = set()
    bodies: list[tuple[str, str, int, str]] = []
    for head, begin, body in _declarations(masked):
        function = _FUNCTION.search(head) if body else None
        if _SPACES.search(head):
            if function and "__global__" in head:
                _check_kernel(text, function, head, begin)
                kernels.add(function[1])
            ours.add(function[1] if function else "")
            if function and "__host__" not in head:
                bodies.append((function[1], head, begin, body))
        elif body and _CLASS.search(head):
            for hosts, name in _members(body):
                (functions if hosts else ours).add(f".{name}")
        elif _NEITHER.search(head.partition("(")[0]):
            continue
        elif function:
            (ours if _MACRO.search(head) else functions).add(function[1])
        elif not body and "(" not in head.partition("=")[0]:
            variable = _VARIABLE.search(head)
            if variable and (variable[2] or not _CONSTANT.search(head)):
                variables.add(variable[1])
    for each in bodies:
        _check_body(text, *each, functions - ours - _known(), variables, ours)
    _check_calls(text, masked, kernels - functions)


def _check_calls(text: str, masked: str, kernels: set[str]) -> None:
    for head, begin, body in _declarations(masked):
        for kernel in sorted(kernels) if not _SPACES.search(head) else ():
            call = re.search(rf"(?<![\w.>:]){kernel}\s*(?:<[^;(){{}}<>]*>\s*)?\(", body)
            if call and not _declared(kernel, head, body):
                said = f"a __global__ function call must be configured: {kernel}<<<grid, block>>>(...)"
                raise _error(text, begin + call.start(), said)


def _check_kernel(text: str, function: re.Match[str], head: str, begin: int) -> None:
    if not re.search(r"\bvoid\b", head):
        raise _error(text, begin, "a __global__ function must have a void return type")
    if "&" in function[0]:  # nvcc compiles it
        said = "a kernel's parameter is a reference, on a GPU an address of the host's memory: pass it by value"
        raise UnsupportedCodeError(text.count("\n", 0, begin) + 1, said)


def _members(body: str) -> Iterator[tuple[bool, str]]:
    """Yield the functions in a class's body: whether each is the host's alone, and its name."""
    for head, _, inner in _declarations(body[1:-1]):
        function = _FUNCTION.search(head) if inner else None
        if function:
            yield not (_SPACES.search(head) or _MACRO.search(head)), function[1]


def device_lines(text: str) -> frozenset[int]:
    """Return the lines of the bodies of kernels and device functions."""
    masked = _without_directives(text)
    lines: set[int] = set()
    for head, begin, body in _declarations(masked):
        if _SPACES.search(head):
            first = text.count("\n", 0, begin) + 1
            lines.update(range(first, first + body.count("\n") + 1))
    return frozenset(lines)


def _without_directives(text: str) -> str:
    return _DIRECTIVE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), mask(text))


def _check_body(
    text: str, name: str, head: str, begin: int, body: str, functions: set[str], variables: set[str], ours: set[str]
) -> None:
    allocates = _ALLOCATES.search(body)
    if allocates:
        line = text.count("\n", 0, begin + allocates.start()) + 1
        what = allocates[1] or allocates[2]
        raise UnsupportedCodeError(line, f"the emulator does not have memory that a kernel allocates ({what})")
    value = _SHARED_VALUE.search(body)
    if value:
        raise _error(text, begin + value.end(), "initializer not allowed for __shared__ variable")
    device = re.search(r"__(?:device|constant|managed)__(?![^;{]*\()", body)
    if device:
        raise _error(text, begin + device.start(), f'a "{device[0]}" variable is not allowed inside a function\'s body')
    calls = [(one, one[1] or one[2]) for one in _LIBRARY.finditer(body) if (one[1] or one[2]) not in ours]
    for each in sorted(functions):
        other, member = each.lstrip("."), each[0] == "."
        front = r"(?:\.|->)\s*" if member else r"(?<![\w.>:])(?:(?:mxnet|op)\s*::\s*)*"
        used = re.finditer(rf"{front}{other}\s*(?:<[^;(){{}}]*>\s*)?\(", body)
        calls += [(one, other) for one in used if member or not _declared(other, head, body)]
    for found, other in calls:
        statement = max(body.rfind(mark, 0, found.start()) for mark in ";{}")
        if not _COMPUTED.match(body, max(0, statement), found.start()):
            said = f'calling a __host__ function("{other}") from a __global__ or __device__ function("{name}")'
            raise _error(text, begin + found.start(), f"{said} is not allowed")
    for other in sorted(variables):
        first = re.search(rf"(?<![\w.>:]){other}\b", body)
        if first and not _declared(other, head, body):
            said = f'identifier "{other}" is undefined in device code ("{name}"): it is a variable of the host\'s'
            raise _error(text, begin + first.start(), said)


def _error(text: str, at: int, message: str) -> CompileError:
    return CompileError(((text.count("\n", 0, at) + 1, message),))


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
    while found := re.compile(r"[;{}]").search(masked, i):
        i, head = found.end(), masked[start : found.start()]
        if found[0] != "{":
            yield head, found.start(), ""
        elif not _TRANSPARENT.search(head):
            i = closing(masked, found.end(), "{}") + 1 or len(masked)
            if "=" in head and not _FUNCTION.search(head):  # an initialiser, which belongs to the head
                continue
            yield head, found.start(), masked[found.start() : i]
        start = i


@cache
def _known() -> frozenset[str]:
    """Names of functions that CUDA has too."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(CUDA.glob("*.h")))
    names = frozenset(re.findall(r"\b([A-Za-z_]\w*)\s*\(", text)) | {"max", "min", "abs"}
    return names | {f".{name}" for name in names}
