"""The grader's file, in TOML: what is tried, how often, within which limits, and what counts."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ece408_op.errors import ProblemError

from ._errors import SpecError
from ._networks import KNOWN, Net

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]


#: A limit of nothing would be passed by no submission.
_LEAST_LIMIT = 0.001


@dataclass(frozen=True)
class LimitsSpec:
    """Seconds and bytes for one submission."""

    build_seconds: float = 180.0
    load_seconds: float = 20.0
    #: One call of forward.
    run_seconds: float = 30.0
    #: All that a submission's programs run.
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
    #: Batch sizes that are tried beside, in one run each, to say what a file can do.
    probe: tuple[int, ...] = (1, 10, 100)
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
    return parse(table, str(path))


def parse(table: Mapping[str, Any], where: str) -> Spec:
    """The spec in a table; raises SpecError."""
    known = {"networks", "network", "images", "runs", "half", "accuracy", "probe", "seed", "limits", "ranking"}
    _only(table, known, where)
    spec = Spec()
    nets = [_named(name, where) for name in _list(table, "networks", str, where)]
    nets += [_own(entry, where) for entry in _list(table, "network", dict, where)]
    names = [net.name for net in nets]
    if len(set(names)) < len(names):
        raise SpecError(f"{where}: network: expected names that differ, got {', '.join(names)}")
    images = _list(table, "images", int, where)
    probe = _list(table, "probe", int, where) if "probe" in table else list(spec.probe)
    for key, sizes in (("images", images), ("probe", probe)):
        if any(size < 1 for size in sizes):
            raise SpecError(f"{where}: {key}: expected numbers of at least 1, got {sizes}")
    spec = replace(spec, nets=tuple(nets), images=tuple(images), probe=tuple(probe))
    if "runs" in table:
        spec = replace(spec, runs=_number(table["runs"], int, 1, f"{where}: runs"))
    if "seed" in table:
        spec = replace(spec, seed=_number(table["seed"], int, 0, f"{where}: seed"))
    half, accuracy = (_flag(table.get(key, True), f"{where}: {key}") for key in ("half", "accuracy"))
    spec = replace(spec, half=half, accuracy=accuracy)
    return replace(
        spec,
        limits=_section(LimitsSpec(), table.get("limits", {}), f"{where}: limits", least=_LEAST_LIMIT),
        ranking=_section(RankingSpec(), table.get("ranking", {}), f"{where}: ranking"),
    )


def _section(default: Any, table: Any, where: str, least: float = 0) -> Any:
    if not isinstance(table, dict):
        raise SpecError(f"{where}: expected a table, got {table!r}")
    types = {one.name: type(getattr(default, one.name)) for one in fields(default)}
    _only(table, set(types), where)
    given = {
        key: _flag(value, f"{where}.{key}")
        if types[key] is bool
        else _number(value, types[key], least, f"{where}.{key}")
        for key, value in table.items()
    }
    return replace(default, **given)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{where}: expected true or false, got {value!r}")
    return value


def _number(value: Any, kind: type, least: float, where: str) -> Any:
    good = isinstance(value, int) if kind is int else isinstance(value, (int, float)) and math.isfinite(value)
    if isinstance(value, bool) or not good or value < least:
        raise SpecError(f"{where}: expected a number of at least {least} ({kind.__name__}), got {value!r}")
    return kind(value)


def _list(table: Mapping[str, Any], key: str, kind: type, where: str) -> list[Any]:
    value = table.get(key, [])
    if not isinstance(value, list) or any(not isinstance(one, kind) or isinstance(one, bool) for one in value):
        raise SpecError(f"{where}: {key}: expected a list of {kind.__name__}, got {value!r}")
    return value


def _only(table: Mapping[str, Any], known: set[str], where: str) -> None:
    strange = sorted(set(table) - known)
    if strange:
        raise SpecError(f"{where}: expected the keys {', '.join(sorted(known))}, got {', '.join(strange)}")


def _named(name: str, where: str) -> Net:
    for net in KNOWN:
        if net.name == name:
            return net
    raise SpecError(f"{where}: networks: expected {', '.join(net.name for net in KNOWN)}, got {name!r}")


def _own(entry: Mapping[str, Any], where: str) -> Net:
    """A [[network]] with a name and layers of [channels, height, width, filters, kernel]."""
    _only(entry, {"name", "layers"}, f"{where}: network")
    name, layers = entry.get("name"), entry.get("layers")
    shapes = isinstance(layers, list) and all(isinstance(one, list) and len(one) == 5 for one in layers)
    if not isinstance(name, str) or not shapes or not layers:
        raise SpecError(
            f"{where}: network: expected a name and layers, a list of [channels, height, width, filters, kernel], "
            f"got {dict(entry)!r}"
        )
    net = Net(name, tuple(tuple(layer) for layer in layers))
    try:
        net.problems(1)
    except ProblemError as error:
        raise SpecError(f"{where}: network {name}: {error}") from None
    return net
