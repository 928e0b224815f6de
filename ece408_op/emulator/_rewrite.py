"""CUDA C++ to C++ for g++: launches, dynamic shared memory, unrolling and PTX. Every line keeps its number.

All else that CUDA adds to C++ is macros, types and functions of the headers in ``cuda/``.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ece408_op.runtime.source_text import COURSE_HEADERS, INCLUDE, mask

from . import _sides
from ._errors import UnsupportedCodeError

CUDA = Path(__file__).parent / "cuda"

_LAUNCH = re.compile(r"<<<")
#: nvcc also knows a launch with spaces in its brackets, as some editors write them.
_SPACED = (re.compile(r"<<[ \t]+<|<[ \t]+<<"), re.compile(r">>[ \t]+>(?=\s*\()|>[ \t]+>>(?=\s*\()"))
_DYNAMIC = re.compile(
    r"\bextern\s+(volatile\s+)?__shared__\s+((?:__align__|alignas)\s*\([^()]*\)\s*)?"
    r"([A-Za-z_][\w:<>, \t]*?(?:\s*\*)*)\s*\b([A-Za-z_]\w*)\s*\[\s*\]\s*;"
)
_UNROLL = re.compile(r"^([ \t]*#[ \t]*pragma[ \t]+)unroll\b[ \t]*\(?[ \t]*(\w*)[ \t]*\)?[^\n]*", re.MULTILINE)
_NOINLINE = re.compile(r"(?<!\()\b__noinline__\b")
#: g++ knows ``__shared__`` as static, which may stand once.
_STATIC_SHARED = re.compile(r"\bstatic\s+(?=__shared__\b)|(?<=\b__shared__)\s+static\b")
_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:(?:volatile|__volatile__)\s*)?\(")
#: Headers that the emulator replaces where they are not among its own. Most submissions use nothing of them.
_REPLACED = re.compile(
    rf"{COURSE_HEADERS}|(\./)?((cublas_v2|nvToolsExt|driver_types|cooperative_groups(/reduce)?)\.h$|.*/include/\w+\.h(pp)?$)"
)
#: What the emulator does not have: the code, and what to say.
_UNSUPPORTED = (
    (r"\b(cublas|cudnn|cufft|curand|cusparse|cusolver)[A-Z]\w*\s*\(", "calls of the library {}"),
    (r"\b(cub|thrust)\s*::", "the library {}"),
    (r"#[ \t]*include[ \t]*<(cub|thrust)/", "the library {}"),
    (r"\b(texture|surface)\s*<", "{} references"),
    (r"\b(tex[123]D\w*|cudaCreateTextureObject|cudaBindTexture\w*)\s*[<(]", "textures ({})"),
    (r"\b(cudaGraph\w+|cudaStreamBeginCapture)\s*\(", "CUDA graphs ({})"),
    (r"\b(cudaLaunch\w*|cudaConfigureCall)\s*\(", "launches by {}"),
    (r"\b(cu(?:Init|Ctx|Module|Mem|Launch|Func)[A-Z]\w*)\s*\(", "CUDA's driver ({})"),
)


def rewrite(text: str, unroll: bool = True, check: bool = True) -> str:
    """Return C++ for ``cuda/ece408_emulator.h``.

    Args:
        unroll: whether to unroll loops where the source asks for it, so that accesses are those of a GPU.
        check: whether to look for what the emulator lacks.

    Raises:
        UnsupportedCodeError: the source uses what the emulator lacks; it has the line.
    """
    masked = mask(text)
    for pattern, what in _UNSUPPORTED if check else ():
        found = re.search(pattern, masked)
        if found:
            name = next((group for group in found.groups() if group), "")
            raise UnsupportedCodeError(_line(text, found.start()), f"the emulator does not have {what.format(name)}")
    if check:
        _sides.check(text)
    text = _STATIC_SHARED.sub(lambda found: re.sub(r"\S", " ", found[0]), _dynamic_shared(text, masked))
    text = _without_spaces(text)
    text = _NOINLINE.sub("__attribute__((noinline))", text)  # no macro: the C++ library uses the name
    text = _replace_all(text, _ASM, _assembly)
    text = _replace_all(text, _LAUNCH, _launch)

    return _unrolled(text) if unroll else _UNROLL.sub("", text)


def _unrolled(text: str) -> str:
    """Write ``#pragma unroll`` as GCC's, in front of loops with a condition: GCC refuses it elsewhere."""
    masked = mask(text)

    def unrolled(found: re.Match[str]) -> str:
        loop = re.compile(r"(?:\s*#[^\n]*\n)*\s*for\s*\(").match(masked, found.end())
        first = _at_depth_0(masked, loop.end(), ";", statement=False) if loop else -1
        if first < 0 or masked[first + 1 :].lstrip().startswith(";"):
            return ""
        return f"{found[1]}GCC unroll {found[2] if found[2].isdigit() else '65534'}"

    return _UNROLL.sub(unrolled, text)


def without_missing_headers(text: str, there: tuple[Path, ...]) -> str:
    """Remove each ``#include`` of a header of MXNet or CUDA that is in none of the folders."""

    def kept(found: re.Match[str]) -> str:
        name = found[2] or found[3]
        exists = any((folder / name).is_file() for folder in there)
        return found[0] if exists or not _REPLACED.match(name) else ""

    return INCLUDE.sub(kept, text)


def local_includes(text: str, folder: Path) -> list[Path]:
    """Return the files of the source's folder that it includes by quotes."""
    masked_names = (found[2] for found in INCLUDE.finditer(text) if found[2])
    return [folder / name for name in masked_names if (folder / name).is_file()]


def with_include(text: str, name: str, content: str, own: str) -> str:
    """Put the content of a file in the place of the line that includes it by quotes; lines keep their numbers."""

    def replaced(found: re.Match[str]) -> str:
        if found[2] is None or Path(found[2]).name != name:
            return found[0]
        line = text.count("\n", 0, found.start()) + 1
        return f'\n#line 1 "{name}"\n{content}\n#line {line} "{own}"\n'

    return INCLUDE.sub(replaced, text)


@cache
def _instructions() -> frozenset[str]:
    text = (CUDA / "ptx.h").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^inline void (\w+)\(", text, re.MULTILINE))


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _replace_all(text: str, pattern: re.Pattern[str], replace: object) -> str:
    """Replace what the pattern finds outside comments: ``replace(text, masked, match)`` returns a range and text."""
    start = 0
    while True:
        masked = mask(text)
        found = pattern.search(masked, start)
        if found is None:
            return text
        begin, end, new = replace(text, masked, found)  # type: ignore[operator]
        text, start = text[:begin] + new + text[end:], begin + len(new)


def _without_spaces(text: str) -> str:
    """Write ``<< <`` and ``>> >`` of launches without the spaces, which go behind them."""
    masked = mask(text)

    def joined(found: re.Match[str]) -> str:
        code = masked[found.start() : found.end()] == found[0]
        return "".join(found[0].split()).ljust(len(found[0])) if code else found[0]

    opened = _SPACED[0].sub(joined, text)
    return text if opened == text else _SPACED[1].sub(joined, opened)


def _dynamic_shared(text: str, masked: str) -> str:
    for found in reversed(list(_DYNAMIC.finditer(masked))):
        kind = f"{found[1] or ''}{found[3]}"
        new = f"{kind} *const {found[4]} = ({kind} *)::emulator::dynamic_shared;"
        text = text[: found.start()] + new + "\n" * found[0].count("\n") + text[found.end() :]
    return text


def _launch(text: str, masked: str, found: re.Match[str]) -> tuple[int, int, str]:
    begin, at = _callee(masked, found.start()), found.end()
    close = _at_depth_0(masked, at, ">>>")
    opening = close + 3
    while close >= 0 and masked[opening : opening + 1].isspace():
        opening += 1
    end = _at_depth_0(masked, opening + 1, ")") if masked[opening : opening + 1] == "(" else -1
    if begin < 0 or close < 0 or end < 0:
        raise UnsupportedCodeError(
            _line(text, found.start()), "expected kernel<<<grid, block>>>(arguments), got other text"
        )
    callee, config = text[begin : found.start()].strip(), text[at:close]
    space, arguments = text[close + 3 : opening], text[opening + 1 : end]
    comma = ", " if masked[opening + 1 : end].strip() else ""
    return begin, end + 1, f"::emulator::launch({config}){space}({as_kernel(callee)}{comma}{arguments})"


def as_kernel(callee: str) -> str:
    """Return the first arguments of ``::emulator::launch(...)``: the kernel's name, and a call of it."""
    name = re.match(r"(?:\s*::)?(?:\s*\w+\s*::)*\s*(\w*)", callee)
    assert name is not None
    return f'"{name[1]}", [=](auto... ece408_p) ECE408_PLAIN __attribute__((noinline)) {{ {callee}(ece408_p...); }}'


def _callee(masked: str, end: int) -> int:
    """Return where the kernel's name, with its namespaces and template arguments, begins; -1 where there is none."""
    i = end
    while True:
        i = len(masked[:i].rstrip())
        if masked[i - 1 : i] == ">":
            i = _back(masked, i - 1, "<", ">")
            i = len(masked[:i].rstrip())
        elif masked[i - 1 : i] == ")":
            return _back(masked, i - 1, "(", ")")
        name = re.search(r"[A-Za-z_]\w*$", masked[:i])
        if name is None:
            return -1
        before = masked[: name.start()].rstrip()
        if not before.endswith("::"):
            return name.start()
        i = len(before) - 2
        if not re.search(r"[\w>]\s*$", masked[:i]):
            return i


def _back(masked: str, at: int, opening: str, closing: str) -> int:
    depth = 0
    for i in range(at, -1, -1):
        depth += (masked[i] == closing) - (masked[i] == opening)
        if not depth:
            return i
    return 0


def _at_depth_0(masked: str, start: int, wanted: str, statement: bool = True) -> int:
    """Return where ``wanted`` stands outside all brackets that open behind ``start``; -1 if not in the statement."""
    depth = 0
    for i in range(start, len(masked)):
        if not depth and masked.startswith(wanted, i):
            return i
        depth += (masked[i] in "([{") - (masked[i] in ")]}")
        if depth < 0 or (statement and masked[i] == ";"):
            return -1
    return -1


def _assembly(text: str, masked: str, found: re.Match[str]) -> tuple[int, int, str]:
    """Write ``asm("op %0, %1;" : "=r"(a) : "r"(b))`` as ``ptx::op(a, b)``."""
    end = _at_depth_0(masked, found.end(), ")", statement=False)
    if end < 0:
        raise UnsupportedCodeError(_line(text, found.start()), "expected asm(...), got no closing parenthesis")
    parts = _split(text[found.end() : end], ":")
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', parts[0])).replace("\\n", " ").replace("\\t", " ").strip()
    lines = "\n" * text[found.start() : end + 1].count("\n")
    if not template:
        return found.start(), end + 1, f"(void)0{lines}"
    operands = [_expression(one) for part in parts[1:3] for one in _split(part, ",") if one.strip()]
    instruction, _, rest = template.rstrip("; ").partition(" ")
    order = list(dict.fromkeys(map(int, re.findall(r"%(\d+)", rest))))
    name = re.sub(r"\W+", "_", instruction)
    if ";" in rest or order != list(range(len(operands))) or name not in _instructions():
        raise UnsupportedCodeError(
            _line(text, found.start()), f"the emulator does not have the PTX instruction {template}"
        )
    return found.start(), end + 1, f"::emulator::ptx::{name}({', '.join(operands)}){lines}"


def _split(text: str, separator: str) -> list[str]:
    """Split text at a letter that stands outside all brackets."""
    pieces, masked, start = [], mask(text), 0
    while (end := _at_depth_0(masked, start, separator, statement=False)) >= 0:
        pieces.append(text[start:end])
        start = end + 1
    return [*pieces, text[start:]]


def _expression(operand: str) -> str:
    """Return a of ``"=r"(a)``."""
    inside = operand[operand.index("(", operand.index('"', operand.index('"') + 1)) :].strip()
    return re.sub(r"\s+", " ", inside[1:-1])
