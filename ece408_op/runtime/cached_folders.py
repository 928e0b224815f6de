"""Folders of compiled programs: made once, known by a digest of what they were made from, and limited in bytes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ece408_op.data import cache_folder
from ece408_op.data.atomic import output_folder_problem

#: Bytes that folders of one kind may take together.
MOST_BYTES = 1 << 30
#: Seconds within which another process may still be making a folder, or be about to use what it found.
_IN_USE_SECONDS = 3600
#: In each folder, the sizes of its other files.
_SIZES = ".sizes.json"


def digest(files: Iterable[Path], *words: str, root: Path) -> str:
    """Return a digest of the files' content and of their names from the root, and of the words."""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        found.update(os.fsencode(path.relative_to(root)) + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    found.update("\0".join(words).encode())
    return found.hexdigest()


def base(private: bool = True) -> Path:
    """Return the user's cache, or a temporary folder that goes when the program ends.

    It is the temporary folder where the cache cannot be written, or where others have to read it (not ``private``).
    """
    cache = cache_folder() if private else None
    if cache is not None and not output_folder_problem(cache):
        return cache
    with _lock:
        return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory(prefix="ece408-op-")
    os.chmod(made.name, 0o755)
    return made


#: Threads that ask at the same time get one folder.
_lock = threading.Lock()


def folder(base: Path, kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of that kind and key in ``base``, which ``make`` fills if it is new or damaged.

    Raises OSError where it cannot be made, and what ``make`` raises.
    """
    path = base / f"{kind}-{key}"
    if _is_whole(path):
        with suppress(OSError):  # this process may only read it
            os.utime(path)
        return path
    base.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=base))
    try:
        make(own)
        sizes = {str(file.relative_to(own)): file.stat().st_size for file in own.rglob("*") if file.is_file()}
        (own / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
        if path.is_dir() and not _is_whole(path):
            _remove(path)
        try:
            os.rename(own, path)
        except OSError:
            if not _is_whole(path):  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    evict(base.glob(f"{kind}-*"), MOST_BYTES)
    evict(base.glob(f".{kind}-*"), 0)  # those that a killed process did not finish
    return path


def _is_whole(path: Path) -> bool:
    """Return whether the folder has all its files: a full disk, a power cut or a cleaner of old files may take some."""
    try:
        sizes = json.loads((path / _SIZES).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):  # AttributeError: JSON of another kind
        return False


def evict(paths: Iterable[Path], most: int) -> None:
    """Remove the least recently returned files and folders beyond ``most`` bytes, but none returned within an hour."""
    used = {}
    for path in paths:
        with suppress(FileNotFoundError):  # another process's scratch folder
            used[path] = path.stat().st_mtime
    for path in sorted(used, key=lambda one: -used[one]):
        most -= _size(path)
        if most < 0 and time.time() - used[path] > _IN_USE_SECONDS:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or a folder; a folder's name goes first, so that no process finds a part of it."""
    with suppress(OSError):  # another process was faster, or this one may not
        if not path.is_dir():
            path.unlink()
            return
        if not path.name.startswith("."):
            path = path.rename(path.with_name(f".{path.name}-{secrets.token_hex(4)}"))
        shutil.rmtree(path)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of a folder with its files."""
    total = 0
    for file in (path, *(Path(root) / name for root, _, names in os.walk(path) for name in names)):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
