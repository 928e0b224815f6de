"""Folders in the user's cache, each known by a digest of what it was made from."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from ece408_op.data import cache_folder

#: Folders of each kind that stay, the latest.
_KEPT = 64


def digest(files: Iterable[Path], *words: str, root: Path) -> str:
    """A digest of the files' content and of their names from the root, and of the words."""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        found.update(f"{path.relative_to(root)}\0".encode() + hashlib.blake2b(path.read_bytes()).digest())
    found.update("\0".join(words).encode())
    return found.hexdigest()


def folder(kind: str, key: str, make: Callable[[Path], None], private: bool = True) -> Path:
    """The folder of that kind and key, which ``make`` fills if it is new.

    It is in the user's cache; where that can't be written, or others have to read it (not ``private``), in a temporary
    folder until the program ends.
    """
    base = (cache_folder() if private else None) or _temporary()
    try:
        base.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=base))
    except OSError:
        base = _temporary()
        own = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=base))
    path = base / f"{kind}-{key}"
    try:
        if not path.is_dir():
            make(own)
            with suppress(OSError):  # another process was faster
                os.rename(own, path)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    os.utime(path)
    for old in sorted(base.glob(f"{kind}-*"), key=lambda one: -one.stat().st_mtime)[_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return path


@cache
def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="ece408-op-"))
    path.chmod(0o755)
    atexit.register(partial(shutil.rmtree, path, ignore_errors=True))
    return path
