"""The submissions of tests/submissions: files with the verdict in the first line, and cases with a common frame."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ece408_op.grade import __main__ as cli

HERE = Path(__file__).parents[1] / "submissions"


class Case(NamedTuple):
    """A submission: its C++ text, and the verdicts that are right, "passed (float32)" with the class of its outputs.

    ``usual`` cases are those of the tests; benchmarks/grader_verdicts.py grades the others too.
    """

    name: str
    expected: tuple[str, ...]
    text: str
    usual: bool = True


def attacks() -> list[Case]:
    """Files that try to be taken for right, to harm, or to see what they must not."""
    return _cases("attacks.cases")


def honest() -> list[Case]:
    """Files without bad intent."""
    files = [(path.stem, path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("cpu/*.h"))]
    return [*(Case(name, _expected(text.partition("\n")[0].partition(": ")[2]), text) for name, text in files),
            *_cases("honest.cases")]  # fmt: skip


def for_a_gpu() -> list[Case]:
    """Files for a GPU: the same kernel with a change."""
    return _cases("gpu.cases", "frame.cuh")


def for_memory() -> list[Case]:
    """Right files for a GPU that differ in how they reach memory."""
    return _cases("memory.cases", "frame_memory.cuh")


def _cases(name: str, frame_name: str = "frame.h") -> list[Case]:
    frame = (HERE / frame_name).read_text(encoding="utf-8")
    found = []
    for part in re.split(r"^== ", (HERE / name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, code = part.partition("\n")
        code = re.sub(r"\A\? .*\n", "", code)
        case, _, expected = title.removesuffix(", rarely").partition(": ")
        code = re.sub(r"\n+# .*\s*\Z", "\n", code)  # the heading of the next group
        outside, split, body = code.rpartition("\n--\n") if "\n--\n" in code else ("", "", code)
        text = frame.replace("\nCASE\n", f"\n{outside}\n").replace("\nBODY\n", f"\n{body.rstrip()}\n")
        found.append(Case(case, _expected(expected), text, not title.endswith(", rarely")))
    return found


def _expected(text: str) -> tuple[str, ...]:
    return tuple(text.split(" or "))


def write(cases: list[Case], folder: Path, name: str = "new-forward.h") -> dict[str, Path]:
    """Write each case as the only file, of that name, of a folder of its own; the paths by case."""
    paths = {}
    for case in cases:
        paths[case.name] = folder / case.name
        paths[case.name].mkdir(parents=True)
        (paths[case.name] / name).write_text(case.text, encoding="utf-8")
    return paths


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder; Python's own removal fails on folders 1,200 levels deep."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def _with_text(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def touch(folder: Path, *names: str) -> None:
    """Make empty files, by their paths from the folder."""
    for name in names:
        _with_text(folder / name)


def graded(paths: Iterable[Path], folder: Path, spec: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command with a grader's file, which it writes into the folder; its exit code, and the records."""
    (folder / "spec.toml").write_text(spec)
    out = folder / "out.json"
    code = cli.main([*map(str, paths), *options, "--spec", str(folder / "spec.toml"), "--json", str(out)])
    data = json.loads(out.read_text())
    assert data["version"] == cli.VERSION
    return code, data["records"]


def _linked(folder: Path) -> None:
    _with_text(folder.parent / "neighbour.txt", "a neighbour's work\n")
    (folder / "new-forward.h").symlink_to(folder.parent / "neighbour.txt")


def _linked_folder(folder: Path) -> None:
    _with_text(folder.parent / "neighbour" / "new-forward.txt")
    (folder / "ece408_src").symlink_to(folder.parent / "neighbour")


def _includes(name: str) -> Callable[[Path], None]:
    return lambda folder: _with_text(folder / "new-forward.h", f'#include "{name}"\n')


def _sparse(folder: Path) -> None:
    _includes("large.h")(folder)
    with open(folder / "large.h", "wb") as file:
        file.truncate(6 << 30)


def _deep(folder: Path) -> None:
    _includes("d/" * 1200 + "x.h")(folder)
    touch(folder, "d/x.h")
    for _ in range(1199):  # from the inside: the whole path is too long for a call
        (folder / "next").mkdir()
        (folder / "d").rename(folder / "next" / "d")
        (folder / "next").rename(folder / "d")


def _with_many_files(folder: Path) -> None:
    _with_text(folder / "new-forward.h", "".join(f'#include "f{n}.h"\n' for n in range(1000)))
    for number in range(1000):
        _with_text(folder / f"f{number}.h")


def _with_special_files(folder: Path) -> None:
    _with_text(folder / "new-forward.h", '#include "pipe.h"\n#include "zeros.h"\n')
    os.mkfifo(folder / "pipe.h")
    (folder / "zeros.h").symlink_to("/dev/zero")


#: Submissions that are odd as files: how a folder is filled, and the verdicts that are right.
LAYOUTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a link to a neighbour's file": (_linked, ("unsupported",)),
    "a link that leads to itself": (lambda f: (f / "new-forward.h").symlink_to("new-forward.h"), ("unsupported",)),
    "a folder that is a link": (_linked_folder, ("unsupported",)),
    "includes a neighbour": (_includes("../neighbour.txt"), ("compile_error",)),
    "includes the system's password file": (_includes("/etc/shadow"), ("compile_error",)),
    "includes a name of 5000 letters": (_includes("x" * 5000), ("compile_error",)),
    "a line\nbreak: passed: in its name": (_includes("x"), ("compile_error",)),
    "a helper of 6 GB": (_sparse, ("compile_error",)),
    "folders 1,200 levels deep": (_deep, ("compile_error",)),
    "a pipe": (lambda f: os.mkfifo(f / "new-forward.h"), ("unsupported",)),
    "helpers that are a pipe and a device": (_with_special_files, ("compile_error",)),
    "a zero byte in a header's name": (_includes("mxnet/\0.h"), ("compile_error",)),
    "a thousand helpers": (_with_many_files, ("compile_error",)),
    "a comment of 234 kB": (lambda f: _with_text(f / "new-forward.h", "/*" * 117_000), ("compile_error",)),
    "no text": (lambda f: (f / "new-forward.h").write_bytes(os.urandom(9999)) and None, ("compile_error",)),
}


def write_layouts(folder: Path) -> dict[str, Path]:
    """Write each odd submission into a folder of its own; the paths by name."""
    paths = {}
    for name, (make, _) in LAYOUTS.items():
        paths[name] = folder / name
        paths[name].mkdir(parents=True)
        make(paths[name])
    return paths


#: The grader's file for them: small layers, one of them with several channels, neither dimension nor batch round.
SPEC = """
images = [19]
runs = 3
network = [{ name = "small", layers = [[1, 28, 28, 5, 5], [3, 11, 9, 4, 3]] }]
[limits]
build_seconds = 20
run_seconds = 4
load_seconds = 4
all_seconds = 12
memory_bytes = 600000000
"""


def name_of(record: dict[str, Any]) -> str:
    """The name of the case or odd folder that a record is about."""
    path = Path(record["path"])
    return (path.parent if path.name == "new-forward.h" else path).name.replace("\\n", "\n")


def verdict(record: dict[str, Any]) -> str:
    """A record's status, with the class of what passed."""
    return record["status"] + (f" ({record['precision']})" if record["status"] == "passed" else "")


def is_right(record: dict[str, Any], expected: tuple[str, ...]) -> bool:
    """Is the verdict one of those? "passed" alone is any class."""
    return bool({verdict(record), record["status"]} & set(expected))


def logged(out: Path) -> dict[str, dict[str, Any]]:
    """The records that a running or killed grader has logged for the file ``out``, by path.

    Without the last, which may not be committed yet.
    """
    log = out.with_name(out.name + ".log")
    if not log.exists():
        return {}
    with closing(sqlite3.connect(f"file:{log}?immutable=1", uri=True)) as file, suppress(sqlite3.DatabaseError):
        rows = file.execute("SELECT record FROM records ORDER BY rowid").fetchall()
        return {record["path"]: record for (text,) in rows[:-1] for record in [json.loads(text)]}
    return {}
