"""Files that appear whole or not at all, and checks of an output path before long work."""

from __future__ import annotations

import argparse
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

#: The errors of a write, which name no file: disk full, quota exceeded, file too large, broken disk.
_OF_A_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def output_file_problem(path: Path) -> str | None:
    """Return why ``replacing(path)`` would fail, as a message for the user; None if it would succeed."""
    # os.path returns False for a folder that this user may not read; Path.is_dir raises PermissionError.
    if os.path.isdir(path):
        return f"expected a file, got the folder {path}"
    if os.path.exists(path) and not os.path.isfile(path):  # root would replace /dev/null for everyone
        return f"expected a file, got {path}, which is a device or a pipe"
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        return f"expected a file in a folder that is there, got {path}"
    if len(os.fsencode(path.name)) > os.pathconf(folder, "PC_NAME_MAX"):
        return f"expected a file with a shorter name, got {path}"
    return None if _is_writable(folder) else f"expected a file in a folder that can be written, got {path}"


def output_folder_problem(path: Path) -> str | None:
    """Return why files cannot be written into the folder ``path``, which need not exist yet; None if they can."""
    whole = path.absolute()
    existing = next(folder for folder in (whole, *whole.parents) if os.path.lexists(folder))
    if not os.path.isdir(existing):
        return f"expected a folder, got {path}, where {existing} is no folder"
    return None if _is_writable(existing) else f"expected a folder that can be written, got {path}"


def output_file(word: str) -> Path:
    """Return the path of a file that will be written: a type for argparse, which reports an unsuitable path."""
    return _possible(Path(word), output_file_problem(Path(word)))


def output_folder(word: str) -> Path:
    """Return the path of a folder into which files will be written: a type for argparse, like ``output_file``."""
    return _possible(Path(word), output_folder_problem(Path(word)))


def _possible(path: Path, problem: str | None) -> Path:
    if problem:
        raise argparse.ArgumentTypeError(problem)
    return path


def _is_writable(folder: Path) -> bool:
    """Return whether files may be created there; not in /dev and /proc, where root would replace system files."""
    real = folder.resolve()
    return real != Path("/dev") and Path("/proc") not in (real, *real.parents) and os.access(real, os.W_OK | os.X_OK)


def write_text(path: Path, text: str) -> None:
    """Atomically replace a file with this text in UTF-8, and create its folder; invalid characters become escapes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces ``path`` atomically when the block ends without an exception.

    The data go to a temporary file in the same folder, because a rename is atomic within one file system only. An
    exception removes the temporary file and leaves ``path`` as it was. Raises OSError if the folder is not writable.
    """
    scratch = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(scratch, "xb") as file:
            yield file
        os.replace(scratch, path)
    except BaseException as error:
        scratch.unlink(missing_ok=True)
        # Other errors of the block, such as a download's, do not concern this file.
        if isinstance(error, OSError) and (
            error.filename == str(scratch) or (error.filename is None and error.errno in _OF_A_WRITE)
        ):
            error.filename = str(path)
        raise
