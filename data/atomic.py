"""A file appears whole under its name or not at all, also when two processes write it at once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def folder_problem(path: Path | None) -> str | None:
    """Why ``replacing(path)`` could not begin, to be said before work that takes long; None where it could."""
    if path is None:
        return None
    # os.path answers False where a folder on the way may not be read; Path's methods raise PermissionError there.
    if os.path.isdir(path):
        return f"expected a file, got the folder {path}"
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        return f"expected a file in a folder that is there, got {path}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"expected a file in a folder that can be written, got {path}"
    return None


def output_folder_problem(path: Path | None) -> str | None:
    """Why files could not be written into that folder, which is made where it is not there; None where they could."""
    if path is None:
        return None
    whole = path.absolute()
    there = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
    if not os.path.isdir(there):
        return f"expected a folder, got {path}, where {there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"expected a folder that can be written, got {path}"
    return None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new binary file that takes the name ``path`` when the block ends without an exception.

    Until then it has a name of its own in the same folder, since a rename is atomic within one file
    system only; after an exception it is removed. Raises OSError where the folder cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(scratch, "xb") as file:
            yield file
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
