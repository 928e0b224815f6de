"""CUDA C++ to C++ for g++: launches, dynamic shared memory, unrolling and PTX. Every line keeps its number.

The headers in ``cuda/`` define everything else that CUDA adds to C++, as macros, types and functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ece408_op.runtime.source_text import COURSE_HEADERS, INCLUDE, mask

from ._errors import UnsupportedCodeError

CUDA = Path(__file__).parent / "cuda"

#: The kernel of a launch, with its namespaces and template arguments, as an element of an array, in parentheses or by a
#: macro with parameters; and the brackets, which may have spaces.
_LAUNCH = re.compile(
    r"((?:(?:::\s*)?\b[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*\s*(?:<(?:[^<>;{}]|<[^<>;{}]*>)*>\s*|\[[^][;]*\]\s*)?"
    r"|\w*\s*\([^();{}]*\)\s*))?(<[ \t]*<[ \t]*<)"
)
_LAUNCH_END = re.compile(r">[ \t]*>[ \t]*>\s*\(")
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ALIGNED = rf"(?:(?:__align__|alignas|__attribute__)\s*{_PARENTHESES}\s*)?"
_DYNAMIC = re.compile(
    rf"\b(?:extern\s+{_ALIGNED}(volatile\s+)?__shared__|__shared__\s+extern)\s+{_ALIGNED}"
    r"([A-Za-z_][\w:<>, \t]*?(?:\s*\*)*)\s*\b([A-Za-z_]\w*)\s*\[\s*\]((?:\s*\[[^][;]*\])*)\s*;"
)
#: A declaration of vectors, which are no aggregates here; initializers of zero for the first element, which also stand
#: for an array's, and of members by name; a member and its value.
_VECTORS = re.compile(
    r"\b(?:u?(?:char|short|int|long|longlong)|float|double)[24]\s+[A-Za-z_]"
    rf"(?:[^;(){{}}]|\{{(?:[^;(){{}}]|{_PARENTHESES}|\{{(?:[^;(){{}}]|{_PARENTHESES})*\}})*\}})*;"
)
_INITIALIZER = re.compile(rf"\{{\s*(?:0(?:\.0*)?f?|(\.[xyzw]\s*=(?:[^(){{}}]|{_PARENTHESES})*))\s*\}}")
_MEMBER = re.compile(rf"\.([xyzw])\s*=((?:[^,()\[\]]|{_PARENTHESES}|\[[^][]*\])*)")
_BOUNDS = re.compile(r"\b__launch_bounds__\s*\(")
#: From the end of a kernel's bounds to its parameters, and from these to its body.
_BOUNDED_NAME, _BODY = re.compile(r"\s*(?:void\s+)?\w+\s*\("), re.compile(r"\s*\{")
_NAME, _PARAMETER = re.compile(r"\b[A-Za-z_]\w*"), re.compile(r"\b([A-Za-z_]\w*)\s*(?:[,)=[]|$)")
#: A directive up to the searched text's end, which a backslash continues on the next line.
_IN_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*\Z", re.MULTILINE | re.DOTALL)
_UNROLL = re.compile(r"^([ \t]*#[ \t]*pragma[ \t]+)unroll\b[ \t]*\(?[ \t]*(\w*)[ \t]*\)?[^\n]*", re.MULTILINE)
#: Directives and the beginning of a loop with a condition.
_LOOP = re.compile(r"(?:\s*#[^\n]*\n)*\s*for\s*\((?:[^;:]|::)*;(?!\s*;)")
#: With more, g++ takes half a minute for a loop from threadIdx.x to a constant.
_MOST_UNROLLED = 128
_NOINLINE = re.compile(r"(?<!\()\b__noinline__\b")
#: g++ knows ``__shared__`` as static, which may stand once, and not in front of a parameter.
_STATIC_SHARED = re.compile(r"\bstatic\s+(?=__shared__\b)|(?<=\b__shared__)\s+static\b|(?<=[(,])\s*__shared__\b")
_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:(?:volatile|__volatile__)\s*)?\(")
_ASM_TEXT = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
#: ``"=r"(a)``, where a may have parentheses, such as ``static_cast<unsigned>(__cvta_generic_to_shared(&s[(i)]))``.
_ASM_OPERAND = re.compile(r'"[=+]?[a-z]"\s*\(((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*)\)')
#: A hint for L2 in an instruction's name.
_ASM_HINT = re.compile(r"\.L2::\w+")
_ASM_REGISTERS = {"%%laneid": "unsigned(::emulator::lane_number())"}
#: These differ only in warps whose threads have diverged.
_BARRIER = re.compile(r"bar(?:rier)?(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
#: Headers that the emulator replaces where they are not among its own. Most submissions use nothing of them.
_REPLACED = re.compile(
    rf"{COURSE_HEADERS}|(\./)?((cublas_v2|nvToolsExt|driver_types|cooperative_groups/reduce)\.h$|.*/include/\w+\.h(pp)?$)"
)


def rewrite(text: str, unroll: bool = True) -> str:
    """Return C++ for ``cuda/ece408_emulator.h``, with loops unrolled where the source asks for it if ``unroll``.

    Raises:
        UnsupportedCodeError: the source has assembly that the emulator lacks, or a launch in an unknown form.
    """
    text = _replace_all(text, _DYNAMIC, _dynamic_shared)
    text = _replace_all(text, _VECTORS, _vectors)
    text = _replace_all(text, _BOUNDS, _launch_bounds)
    text = _STATIC_SHARED.sub(lambda found: re.sub(r"\S", " ", found[0]), text)
    text = _NOINLINE.sub("__attribute__((noinline))", text)  # no macro: the C++ library uses the name
    text = _replace_all(text, _ASM, _assembly)
    text = _replace_all(text, _LAUNCH, _launch)
    return _replace_all(text, _UNROLL, _unrolled) if unroll else _UNROLL.sub("", text)


def without_missing_headers(text: str, there: tuple[Path, ...]) -> str:
    """Remove each ``#include`` of a header of MXNet or CUDA that is in none of the folders."""

    def kept(found: re.Match[str]) -> str:
        name = found[2] or found[3]
        exists = any((folder / name).is_file() for folder in there)
        return found[0] if exists or not _REPLACED.match(name) else ""

    return INCLUDE.sub(kept, text)


def as_kernel(callee: str) -> str:
    """Return the first arguments of ``::emulator::launch(...)``: the kernel's name, and a call of it."""
    name = re.match(r"(?:\s*::)?(?:\s*\w+\s*::)*\s*(\w*)", callee)
    assert name is not None
    return f'"{name[1]}", [=](auto... ece408_p) ECE408_PLAIN __attribute__((noinline)) {{ {callee}(ece408_p...); }}'


def _replace_all(
    text: str, pattern: re.Pattern[str], replacement: Callable[[str, str, re.Match[str]], tuple[int, str]]
) -> str:
    """Replace what the pattern finds outside comments and literals; lines keep their numbers.

    ``replacement(text, masked, match)`` returns the end of what it replaces, and the new text.
    """
    start = 0
    while found := pattern.search(masked := mask(text), start):
        end, new = replacement(text, masked, found)
        new += "\n" * (text.count("\n", found.start(), end) - new.count("\n"))
        text, start = text[: found.start()] + new + text[end:], found.start() + len(new)
    return text


def _vectors(text: str, masked: str, found: re.Match[str]) -> tuple[int, str]:
    """Give a vector's constructor the values of its members in order, at least two; write zero as ``{}``."""
    parts, start = [], found.start()
    for one in _INITIALIZER.finditer(masked, *found.span()):
        members = _MEMBER.finditer(masked, *one.span(1)) if one[1] else ()
        values = {member[1]: text[member.start(2) : member.end(2)] for member in members}
        given = "xyzw"[: max(2, "xyzw".index([*values][-1]) + 1)] if values else ""
        parts += [text[start : one.start()], "{", ", ".join(values.get(name, "0") for name in given), "}"]
        start = one.end()
    return found.end(), "".join([*parts, text[start : found.end()]])


def _dynamic_shared(text: str, masked: str, found: re.Match[str]) -> tuple[int, str]:
    kind, rows = f"{found[1] or ''}{found[2]}", " ".join(found[4].split())
    pointer = (f"(*const {found[3]}){rows}", f"(*){rows}") if rows else (f"*const {found[3]}", "*")
    return found.end(), f"{kind} {pointer[0]} = ({kind} {pointer[1]})::emulator::dynamic_shared;"


def _launch_bounds(text: str, masked: str, found: re.Match[str]) -> tuple[int, str]:
    """Have the kernel's body begin with a check of the block's threads, where template arguments are known."""
    end = closing(masked, found.end())
    name = _BOUNDED_NAME.match(masked, end + 1) if end >= 0 else None
    close = closing(masked, name.end()) if name else -1
    body = _BODY.match(masked, close + 1) if close >= 0 else None
    if not name or not body or _IN_DIRECTIVE.search(masked, 0, found.start()):
        return found.end(), found[0]
    parameters = set(_PARAMETER.findall(masked, name.end(), close))
    if parameters.intersection(_NAME.findall(masked, found.end(), end)):  # in the body, it is the parameter
        return found.end(), found[0]
    check = f"if (::emulator::beyond_bounds({text[found.end() : end]})) return;"
    return body.end(), f"{text[end + 1 : body.end()]} {check}"


def _launch(text: str, masked: str, found: re.Match[str]) -> tuple[int, str]:
    if text[found.start(2) : found.end(2)] != found[2]:  # << "text" <<
        return found.end(), text[found.start() : found.end()]
    close = _LAUNCH_END.search(masked, found.end())
    end = closing(masked, close.end()) if close else -1
    if found[1] is None or close is None or ";" in masked[found.end() : close.start()] or end < 0:
        said = "expected kernel<<<grid, block>>>(arguments), got other text"
        raise UnsupportedCodeError(_line(text, found.start()), said)
    kernel = as_kernel(text[found.start() : found.end(1)].strip())
    comma = ", " if masked[close.end() : end].strip() else ""
    space = "\n" * close[0].count("\n")
    arguments = f"{kernel}{comma}{text[close.end() : end]}"
    return end + 1, f"::emulator::launch({text[found.end() : close.start()]}){space}({arguments})"


def _unrolled(text: str, masked: str, found: re.Match[str]) -> tuple[int, str]:
    """Write ``#pragma unroll`` as GCC's, in front of loops with a condition: GCC refuses it elsewhere."""
    if not _LOOP.match(masked, found.end()):
        return found.end(), ""
    return found.end(), f"{found[1]}GCC unroll {found[2] if found[2].isdigit() else _MOST_UNROLLED}"


def _assembly(text: str, masked: str, found: re.Match[str]) -> tuple[int, str]:
    """Write ``asm("op %0, [%1], 4;" : "=r"(a) : "r"(b))`` as ``ptx::op(a, b, 4)``."""
    end = closing(masked, found.end())
    inside = text[found.end() : end]
    strings = _ASM_TEXT.match(inside)
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', strings[1] if strings else ""))
    template = template.replace("\\n", " ").replace("\\t", " ").strip()
    if end >= 0 and not template:
        return end + 1, "(void)0"
    instruction, _, rest = template.rstrip("; ").partition(" ")
    instruction = _BARRIER.sub(r"bar.\1", instruction)
    name, operands = re.sub(r"\W+", "_", _ASM_HINT.sub("", instruction)), _ASM_OPERAND.findall(inside)
    given = re.findall(r"[^][{},\s]+", rest)
    numbered = {f"%{number}": " ".join(one.split()) for number, one in enumerate(operands)} | _ASM_REGISTERS
    known = all(one in numbered or one.isdigit() for one in given)
    if end < 0 or not known or (name, len(given)) not in _instructions():
        said = f"the emulator does not have the PTX instruction {template}"
        raise UnsupportedCodeError(_line(text, found.start()), said)
    return end + 1, f"::emulator::ptx::{name}({', '.join(numbered.get(one, one) for one in given)})"


@cache
def _instructions() -> set[tuple[str, int]]:
    """Return each instruction with its number of operands."""
    text = (CUDA / "ptx.h").read_text(encoding="utf-8")
    found = re.findall(r"^(?:inline|__forceinline__) void (\w+)\(([^)]*)\)", text, re.MULTILINE)
    return {(name, len(parameters.split(",")) if parameters else 0) for name, parameters in found}


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def closing(masked: str, start: int, brackets: str = "()") -> int:
    """Return where the bracket closes that is open in front of ``start``; -1 where none does."""
    depth = 1
    for found in re.compile(f"[{brackets}]").finditer(masked, start):
        depth += 1 if found[0] == brackets[0] else -1
        if not depth:
            return found.start()
    return -1
