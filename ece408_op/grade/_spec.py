"""The grader's file, in TOML: networks and batch sizes to try, how often, the limits, and the ranking."""

from __future__ import annotations

import reprlib
import secrets
import sys
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ece408_op.errors import Ece408Error, ProblemError
from ece408_op.problem import KNOWN_NETS, Net
from ece408_op.submission.sandbox import LimitsSpec

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


class SpecError(Ece408Error, ValueError):
    """The command or the grader's file cannot be used; the message names the option or the key: exit code 2."""


@dataclass(frozen=True)
class RankingSpec:
    """The range of points to which the ranking is mapped; it ends ``clamp`` standard deviations from the median."""

    best: float = 100.0
    worst: float = 0.0
    clamp: float = 2.0
    mix_precisions: bool = False  # are float32, TF32 and half precision ranked together?


@dataclass(frozen=True)
class Spec:
    """What is graded: the grader's file, see docs/grading.md, its text, and the command's option --quick.

    ``nets`` and ``images`` are empty where the file's own constants and the context decide, and so is ``runs`` 0. The
    inputs come from the seed, which no submission can know.
    """

    nets: tuple[Net, ...] = ()
    images: tuple[int, ...] = ()
    runs: int = 0
    half: bool = True
    accuracy: bool = True
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    quick: bool = False
    text: str = ""
    limits: LimitsSpec = LimitsSpec()
    ranking: RankingSpec = RankingSpec()

    @property
    def demanding(self) -> bool:
        """Does the grader's file say what a submission must do?"""
        return bool(self.nets or self.images)


#: The least value of a key: a limit of nothing would be passed by no submission.
_LEAST = {"images": 1, "runs": 1, "limits": 0.001}
#: The largest value: larger ones overflow the system's clocks and limits, or take the grader's memory.
_MOST = {int: 2**62, float: 1e9, "runs": 10**5}
_MOST_LAYERS = 50  # the most layers of a network: each takes some file descriptors
#: The type of a key's values where its default does not show it, and fields that are no keys.
_LIKE, _NO_KEYS = {"images": (0,)}, {"nets", "quick", "text"}
#: The type of a [[network]].
_OWN = Net("", ((0,),))  # type: ignore[arg-type]


def load(path: Path | None) -> Spec:
    """Read the grader's file; without one, the defaults. Raises SpecError, which names file and key."""
    if path is None:
        return Spec()
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        said = getattr(error, "strerror", None) or error
        raise SpecError(f"{path}: expected TOML that can be read, got {said}") from None
    where, known = str(path), {net.name: net for net in KNOWN_NETS}
    names = _checked(table.pop("networks", []), [""], f"{where}: networks")
    if not set(names) <= set(known):
        raise SpecError(f"{where}: networks: expected {', '.join(known)}, got {', '.join(names)}")
    own = _checked(table.pop("network", []), [_OWN], f"{where}: network", 1)
    for net in own:
        try:
            if not net.name or not net.name.isprintable() or {len(layer) for layer in net.layers} != {5}:
                raise ProblemError("expected a name and layers, a list of [channels, height, width, filters, kernel]")
            if len(net.layers) > _MOST_LAYERS:
                raise ProblemError(f"expected at most {_MOST_LAYERS} layers, got {len(net.layers)}")
            net.problems(1)
        except ProblemError as error:
            raise SpecError(f"{where}: network {net.name!r}: {error}") from None
    nets = [known[name] for name in names] + own
    if len({net.name for net in nets}) < len(nets):
        raise SpecError(f"{where}: network: expected names that differ, got {', '.join(net.name for net in nets)}")
    return _checked(table, Spec(nets=tuple(nets), text=text), where)


def _checked(value: Any, like: Any, where: str, least: float = 0, name: str = "") -> Any:
    """The value, if it is of the type of ``like`` and from ``least`` to ``_MOST``; a list's elements too.

    A table becomes a dataclass such as ``like``, from which it has the values of keys that it lacks.
    """
    if is_dataclass(like) and not isinstance(like, type):
        known = {one.name: getattr(like, one.name) for one in fields(like) if one.name not in _NO_KEYS}
        if strange := sorted(set(_checked(value, {}, where)) - set(known)):
            keys = [*known, *(("network", "networks") if isinstance(like, Spec) else ())]
            raise SpecError(f"{where}: expected the keys {', '.join(sorted(keys))}, got {', '.join(strange)}")
        given = {}
        for key, one in value.items():
            given[key] = _checked(one, _LIKE.get(key, known[key]), f"{where}: {key}", _LEAST.get(key, least), key)
        return replace(like, **given)
    if isinstance(like, (list, tuple)):
        if not isinstance(value, list):
            raise SpecError(f"{where}: expected a list of {type(like[0]).__name__}, got {reprlib.repr(value)}")
        return type(like)(_checked(one, like[0], where, least) for one in value)
    kind, number = type(like), isinstance(like, (int, float)) and not isinstance(like, bool)
    most = _MOST.get(name, _MOST.get(kind, 0))
    right = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not right or (number and not least <= value <= most):
        names = {bool: "true or false", str: "a text", dict: "a table"}
        expected = f"a number from {least} to {most} ({kind.__name__})" if number else names[kind]
        raise SpecError(f"{where}: expected {expected}, got {reprlib.repr(value)}")
    return kind(value)
