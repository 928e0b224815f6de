"""What is graded: the networks, which of them a file's own constants point to, and the grader's file, in TOML.

The grader's file says what is tried, how often, within which limits, and what counts.
"""

from __future__ import annotations

import math
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ece408_op.errors import ProblemError
from ece408_op.problem import COURSE_LAYERS, ConvProblem

from ._errors import SpecError
from ._sources import without_comments

#: channels, height, width, filters, kernel
Layer = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Net:
    """The convolutions of one network, in order."""

    name: str
    layers: tuple[Layer, ...]

    def problems(self, images: int) -> list[ConvProblem]:
        """Each layer's problem for that number of images."""
        return [ConvProblem(images, *layer) for layer in self.layers]


NETS = tuple(
    Net(term, tuple(tuple(layer.sizes.values())[1:] for name, layer in COURSE_LAYERS.items() if name.startswith(term)))
    for term in ("2017", "2018sp", "2018fa")
)

#: Those of 2019, whose sizes the course's scripts and its submissions tell. This project has no weights for them, and
#: most files can do any network: they are tried where a file points to them, or can do none of the others.
LATER = (
    Net("2019sp", ((1, 48, 48, 6, 5), (6, 22, 22, 16, 5))),
    Net("2019fa", ((1, 70, 70, 12, 5), (12, 33, 33, 24, 5))),
)
KNOWN = NETS + LATER
#: The course's terms.
TERMS = {net.name: f"{net.name[:4]} {'spring' if net.name.endswith('sp') else 'fall'}" for net in KNOWN}

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


def numbers(source: str) -> set[int]:
    """The whole numbers that a C++ file's code holds, comments left out."""
    return {int(text) for text in _NUMBER.findall(without_comments(source))}


def batches_in(source: str) -> list[int]:
    """The numbers of a C++ file's code that may be a batch size to which it is tied, in order."""
    return sorted(_BATCHES & numbers(source))


def sizes_in(source: str) -> set[int]:
    """The numbers that may be sizes of a layer: without the widths of blocks, with products such as 24 * 12 * 7 * 7."""
    code = _NAMED.sub(lambda one: " " if _WIDTH.search(one[1]) else one[0], without_comments(source))
    found = numbers(code)
    for chain in _PRODUCT.findall(code):
        factors = [int(factor) for factor in chain.split("*")]
        found |= {prod(factors[i:j]) for i in range(len(factors)) for j in range(i + 2, len(factors) + 1)}
    return found


def pointed_to(source: str) -> list[Net]:
    """The networks, those that the file's constants point to most strongly first; empty where they point to none.

    A number points to a network where it is a size, or a product of sizes, of that network and of no other.
    """
    found, sizes = sizes_in(source), {net: _sizes(net) - _COMMON for net in KNOWN}
    score = {}
    for net in KNOWN:
        others = set().union(*(sizes[other] for other in KNOWN if other is not net))
        score[net] = len(found & (sizes[net] - others))
    return sorted((net for net in KNOWN if score[net]), key=lambda net: -score[net])


def _sizes(net: Net) -> set[int]:
    found: set[int] = set()
    for channels, height, width, filters, kernel in net.layers:
        rows, columns, area = height - kernel + 1, width - kernel + 1, kernel * kernel
        found |= {channels, height, width, filters, kernel, rows, columns, area, channels * area, filters * area}
        found |= {filters * channels * area, height * width, rows * columns, channels * height * width}
        found |= {filters * rows * columns, columns * filters, channels * filters}
    return found


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]


@dataclass(frozen=True)
class LimitsSpec:
    """Seconds and bytes for one submission: ``run_seconds`` for a call of forward, ``all_seconds`` for all of them."""

    build_seconds: float = 180.0
    load_seconds: float = 20.0
    run_seconds: float = 30.0
    all_seconds: float = 1800.0
    memory_bytes: int = 8 << 30
    output_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    processes: int = 256


@dataclass(frozen=True)
class RankingSpec:
    """The range of points that the ranking is mapped on, best and worst, and where it is clamped."""

    best: float = 100.0
    worst: float = 0.0
    #: Standard deviations from the median at which the range ends, on either side.
    clamp: float = 2.0
    #: Are float32, TF32 and half precision ranked together?
    mix_precisions: bool = False


@dataclass(frozen=True)
class Spec:
    """What is graded. ``nets`` and ``images`` are empty where the file's own constants and the context decide."""

    nets: tuple[Net, ...] = ()
    images: tuple[int, ...] = ()
    #: Timed runs of each layer; 0: as many as the context has by default.
    runs: int = 0
    #: Does half precision pass?
    half: bool = True
    #: Is the accuracy of the course's trained networks measured?
    accuracy: bool = True
    #: Where the inputs come from: nothing that a submission can know.
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    #: One network, 100 images and one timed run, for a first look; an option of the command.
    quick: bool = False
    limits: LimitsSpec = LimitsSpec()
    ranking: RankingSpec = RankingSpec()

    @property
    def demanding(self) -> bool:
        """Does the grader's file say what a submission must do?"""
        return bool(self.nets or self.images)


#: The least value of a key: a limit of nothing would be passed by no submission.
_LEAST = {"images": 1, "runs": 1, "limits": 0.001}


def load(path: Path | None) -> Spec:
    """Read the grader's file; without one, the defaults. Raises SpecError, which names file and key."""
    if path is None:
        return Spec()
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise SpecError(f"{path}: expected a readable TOML file, got {error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: expected TOML, got {error}") from None
    where, known = str(path), {net.name: net for net in KNOWN}
    names = _checked(table.pop("networks", []), [""], 0, f"{where}: networks")
    if not set(names) <= set(known):
        raise SpecError(f"{where}: networks: expected {', '.join(known)}, got {', '.join(names)}")
    own = _checked(table.pop("network", []), [{}], 0, f"{where}: network")
    nets = [known[name] for name in names] + [_own(entry, f"{where}: network") for entry in own]
    if len({net.name for net in nets}) < len(nets):
        raise SpecError(f"{where}: network: expected names that differ, got {', '.join(net.name for net in nets)}")
    return replace(_filled(Spec(), table, where, {"nets", "quick"}), nets=tuple(nets))


def _filled(default: Any, table: Mapping[str, Any], where: str, no_keys: set[str], least: float = 0) -> Any:
    """The dataclass with the table's values, each of its default's type."""
    known = {one.name: getattr(default, one.name) for one in fields(default) if one.name not in no_keys}
    strange = sorted(set(table) - set(known))
    if strange:
        raise SpecError(f"{where}: expected the keys {', '.join(sorted(known))}, got {', '.join(strange)}")
    given = {}
    for key, value in table.items():
        place, smallest = f"{where}: {key}", _LEAST.get(key, least)
        if is_dataclass(known[key]):
            given[key] = _filled(known[key], _checked(value, {}, 0, place), place, set(), smallest)
        elif isinstance(known[key], tuple):
            given[key] = tuple(_checked(value, [0], smallest, place))
        else:
            given[key] = _checked(value, known[key], smallest, place)
    return replace(default, **given)


def _checked(value: Any, like: Any, least: float, where: str) -> Any:
    """The value, if it is of the type of ``like`` and at least ``least``; a list's elements are like its element."""
    if isinstance(like, list):
        if not isinstance(value, list):
            raise SpecError(f"{where}: expected a list of {type(like[0]).__name__}, got {value!r}")
        return [_checked(one, like[0], least, where) for one in value]
    kind, number = type(like), isinstance(like, (int, float)) and not isinstance(like, bool)
    right = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not right or (number and not (math.isfinite(value) and value >= least)):
        expected = f"a number of at least {least} ({kind.__name__})" if number else _NAMES[kind]
        raise SpecError(f"{where}: expected {expected}, got {value!r}")
    return kind(value)


_NAMES = {bool: "true or false", str: "a text", dict: "a table"}


def _own(entry: Mapping[str, Any], where: str) -> Net:
    """A [[network]] with a name and layers of [channels, height, width, filters, kernel]."""
    expected = "expected a name and layers, a list of [channels, height, width, filters, kernel]"
    if set(entry) != {"name", "layers"}:
        raise SpecError(f"{where}: {expected}, got {dict(entry)!r}")
    layers = _checked(entry["layers"], [[0]], 1, f"{where}: layers")
    net = Net(_checked(entry["name"], "", 0, f"{where}: name"), tuple(tuple(layer) for layer in layers))
    try:
        if not layers or {len(layer) for layer in layers} != {5}:
            raise ProblemError(f"{expected}, got {layers}")
        net.problems(1)
    except ProblemError as error:
        raise SpecError(f"{where} {net.name}: {error}") from None
    return net
