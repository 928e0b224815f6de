"""A submission's text: its source, the files that this includes, MXNet's headers; and the sizes in its constants."""

from __future__ import annotations

import codecs
import os
import re
from collections import Counter
from contextlib import suppress
from math import prod
from pathlib import Path

from ece408_op.problem import KNOWN_NETS, Net
from ece408_op.runtime.source_text import COURSE_HEADERS, INCLUDE, without_comments

from . import EndedError

#: The suffixes of files in C++, by the device that one computes on.
SUFFIXES_OF = {"cpu": (".h", ".hpp", ".cpp", ".cc"), "gpu": (".cuh", ".cu")}
SUFFIXES = (*SUFFIXES_OF["cpu"], *SUFFIXES_OF["gpu"], ".py")  # the suffixes of files that can be graded
MOST_BYTES = 8 << 20  # bytes and files of one submission, at most
_MOST_FILES = 200
#: Bytes of an included file's name from the folder: Python makes and removes folders in folders by recursion.
_LONGEST_NAME = 400
#: Characters of a submission that are searched: an expression holds Python's lock, and no signal is taken meanwhile.
SEARCHED = 1 << 20

#: A header of a system's own, by its place there; the course's machines had CUDA and MXNet where others do not.
_ABSOLUTE = re.compile(
    rb'^([ \t]*#[ \t]*include[ \t]*)["<](/[^">\r\n]{0,400}/include/([^">\r\n]{1,200}))[">]', re.MULTILINE
)
#: `#pragma unroll NAME`: the number of iterations is a macro.
_UNROLL = re.compile(rb"^([ \t]*#[ \t]*pragma[ \t]+unroll)\b[ \t(]*[A-Za-z_][^\r\n]*", re.MULTILINE)
#: The course's own file next to a student's, which is MXNet's for the greater part: a stand-in takes its place.
OPERATOR = "new-inl.h"
_LEVELS = 4  # how far up such a path may begin
#: Sizes that block widths have too, and small numbers that loops have: alone they point nowhere.
_COMMON = frozenset({*range(9), 10, 15, 16, 20, 25, 32, 64, 100, 128, 256, 512, 1000, 1024, 10000})
#: Batch sizes that the course spoke of, to which a file may be tied.
_BATCHES = frozenset({10, 100, 500, 1000, 2000, 5000, 10000})
#: A whole number, 66.0 and 66.f too.
_NUMBER = re.compile(r"(?<![\w.])(\d{1,9})(?:\.0*f?)?(?![\w.])")
_PRODUCT = re.compile(r"(?<![\w.])\d{1,9}(?: {0,4}\* {0,4}\d{1,9}){1,7}(?![\w.])")
#: A name and the number that it stands for. A block's width may be any size less a kernel's: it points nowhere.
_NAMED = re.compile(r"\b([A-Za-z_]\w{0,80})[ \t]{0,8}=?[ \t]{0,8}\d{1,9}\b")
_WIDTH = re.compile(r"TILE|BLOCK|BATCH|STREAM", re.IGNORECASE)


def device_of(path: Path) -> str:
    """Return the device that a file computes on, "cpu" or "gpu", by its name or, for Python, its text; none is run."""
    if path.suffix.lower() == ".py":
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES)
        makes_no_other = b"CudaKernel" in text and b"CpuKernel(" not in text
        return "gpu" if b"CudaKernel(" in text or makes_no_other else "cpu"
    return "gpu" if path.suffix.lower() in SUFFIXES_OF["gpu"] else "cpu"


def check_text(name: str, content: bytes) -> None:
    """Raise EndedError for a source that no compiler reads."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise EndedError("compile_error", f"{name} is UTF-16 text, which no compiler reads; save it as UTF-8")
    if not content.removeprefix(codecs.BOM_UTF8).strip():
        raise EndedError("compile_error", f"{name} is empty")


def copy(source: Path, to: Path, alone: bool = False) -> str:
    """Copy the source and, at their places, the files of its folder that it includes or, in Python, names.

    Without links, and up to a size; neighbours that nobody includes stay behind: in a class they are others' work. A
    header ``</somewhere/include/NAME>`` that is not there becomes ``<NAME>``. Returns the beginning of all of it as one
    text. Raises EndedError where the source itself cannot be read or is too large, and where one that is to be
    ``alone`` includes a neighbour.
    """
    root, waiting, done, left = source.parent, [source.name], dict[str, str](), MOST_BYTES
    while waiting and len(done) < _MOST_FILES:
        name = waiting.pop()
        path = root / name
        helper = path != source
        taken = path.name != OPERATOR and len(os.fsencode(name)) <= _LONGEST_NAME
        if name in done or (helper and (not taken or os.path.islink(path) or not os.path.isfile(path))):
            continue
        if alone and helper:
            text = f"it includes {name}, which lies next to it in a folder of several submissions"
            raise EndedError("unsupported", f"{text}; give each submission a folder of its own")
        try:
            if path.stat().st_size > left or not path.is_file():
                raise OSError(f"expected a file of at most {MOST_BYTES >> 20} MB")
            content = _ABSOLUTE.sub(_by_name, path.read_bytes())
        except OSError as error:
            if not helper:
                raise EndedError("unsupported", f"{name} cannot be read: {error.strerror or error}") from None
            continue
        left -= len(content)
        done[name] = content.decode(errors="replace")
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
        waiting += _named(root, content) if source.suffix.lower() == ".py" else _within(root, path.parent, done[name])
    return "\n".join(done.values())[:SEARCHED]


def unroll_without_names(folder: Path) -> bool:
    """Remove the number of times from each ``#pragma unroll NAME`` in all that was copied; whether there was one."""
    found = 0
    for path in filter(Path.is_file, folder.rglob("*")):
        content, count = _UNROLL.subn(rb"\1", path.read_bytes())
        path.write_bytes(content)
        found += count
    return found > 0


def _by_name(include: re.Match[bytes]) -> bytes:
    return include[0] if os.path.isfile(include[2]) else b"%b<%b>" % (include[1], include[3])


def add_stubs(code: str, stubs: Path) -> list[Path]:
    """Make an empty header for each that the code includes and MXNet's tree or CUDA had.

    Returns the folders to look in last: from the n-th, a path that begins with n ``../`` leads to the headers.
    """
    folders = [stubs.joinpath(*["down"] * level) for level in range(_LEVELS)]
    folders[-1].mkdir(parents=True, exist_ok=True)
    names = {found[2] or found[3] for found in INCLUDE.finditer(code)}
    for name in sorted(filter(re.compile(COURSE_HEADERS).match, names))[:_MOST_FILES]:
        rest = Path(re.sub(r"^(\./|\.\./)+", "", name))
        if ".." in rest.parts or rest.is_absolute() or len(name) > _LONGEST_NAME:
            continue
        with suppress(OSError, ValueError):  # a name that no file can have is none
            (stubs / rest).parent.mkdir(parents=True, exist_ok=True)
            (stubs / rest).touch()
    return folders


def _named(root: Path, content: bytes) -> list[str]:
    """The names of the root's files that a Python file's text holds: kernels' sources lie next to it."""
    words = {*re.split(rb"[\"'<>/\\\r\n]", content)}  # to look for each file in the text takes minutes for many files
    files = (name for name in os.listdir(root) if name.lower().endswith((".cu", ".cuh", ".h")))
    return [name for name in files if os.fsencode(name) in words]


def _within(root: Path, folder: Path, content: str) -> list[str]:
    """The names, from the root, of what a file in that folder includes by quotes and that lies within the root."""
    names, top = [], os.path.realpath(root)
    quoted = (found[2] for found in INCLUDE.finditer(content))
    for name in list(dict.fromkeys(filter(None, quoted)))[:_MOST_FILES]:
        with suppress(ValueError, OSError):
            names.append(str(Path(os.path.realpath(folder / name)).relative_to(top)))
    return names


def batches_in(source: str) -> list[int]:
    """The numbers of a C++ file's code that may be a batch size to which it is tied, in order."""
    return sorted(_BATCHES & _numbers(without_comments(source)))


def _numbers(code: str) -> set[int]:
    return {int(text) for text in _NUMBER.findall(code)}


def pointed_to(source: str) -> list[Net]:
    """The networks, those that the file's constants point to most strongly first; empty where they point to none.

    A number points to a network where it is a size, or a product of sizes, of that network and of no other.
    """
    # Without the widths of blocks, and with products such as 24 * 12 * 7 * 7.
    code = _NAMED.sub(lambda one: " " if _WIDTH.search(one[1]) else one[0], without_comments(source))
    found = _numbers(code)
    for chain in _PRODUCT.findall(code):
        factors = [int(factor) for factor in chain.split("*")]
        found |= {prod(factors[i:j]) for i in range(len(factors)) for j in range(i + 2, len(factors) + 1)}
    sizes = {net: set().union(*map(_sizes, net.layers)) - _COMMON for net in KNOWN_NETS}
    nets_with = Counter(size for own in sizes.values() for size in own)
    score = {net: sum(nets_with[size] == 1 for size in found & own) for net, own in sizes.items()}
    return sorted(filter(score.get, KNOWN_NETS), key=lambda net: -score[net])


def _sizes(layer: tuple[int, int, int, int, int]) -> set[int]:
    """The numbers that a file for this layer may hold."""
    channels, height, width, filters, kernel = layer
    rows, columns, area = height - kernel + 1, width - kernel + 1, kernel * kernel
    of_w = {area, channels * filters, channels * area, filters * area, filters * channels * area}
    of_y = {rows, columns, rows * columns, columns * filters, filters * rows * columns}
    return {*layer, height * width, channels * height * width} | of_w | of_y
