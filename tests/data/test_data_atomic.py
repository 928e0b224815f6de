"""Files replace others completely or not at all; output paths are checked before long work, without an exception."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ece408_op.data import atomic
from ece408_op.data.atomic import output_file_problem, output_folder_problem, replacing, write_text


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        *((path, None) for path in ("new.json", "file", "folder/new.json", "x" * 255)),
        ("x" * 256, f"expected a file with a shorter name, got {'x' * 256}"),
        ("", "expected a file, got the folder ."),
        ("folder", "expected a file, got the folder folder"),
        ("nowhere/x", "expected a file in a folder that is there, got nowhere/x"),
        ("file/x", "expected a file in a folder that is there, got file/x"),
        ("/dev/null", "expected a file, got /dev/null, which is a device or a pipe"),
        ("/dev/new.json", "expected a file in a folder that can be written, got /dev/new.json"),
        ("/proc/self/new.json", "expected a file in a folder that can be written, got /proc/self/new.json"),
    ],
)
def test_output_files(path: str, problem: str | None) -> None:
    assert output_file_problem(Path(path)) == problem


@pytest.mark.parametrize(
    ("path", "blocking"),
    [
        *((path, None) for path in ("", "folder", "new", "new/and/newer", "folder/../new")),
        *(("file", "file"), ("file/x/y", "file"), ("dangling", "dangling")),
    ],
)
def test_output_folders(path: str, blocking: str | None) -> None:
    expected = blocking and f"expected a folder, got {path}, where {Path.cwd() / blocking} is no folder"
    assert output_folder_problem(Path(path)) == expected


def test_folders_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    assert output_file_problem(Path("x")) == "expected a file in a folder that can be written, got x"
    assert output_folder_problem(Path("x/y")) == "expected a folder that can be written, got x/y"


@pytest.mark.skipif(os.getuid() != 0, reason="needs to be root, to become another user")
def test_a_folder_that_another_user_may_not_read() -> None:
    """As a user other than root, Path.is_dir and Path.exists raise PermissionError (Python 3.8 to 3.13)."""
    Path("folder").chmod(0o700)
    source = Path(atomic.__file__).read_text(encoding="utf-8")
    code = (
        "import os\nfrom pathlib import Path\nos.setuid(65534)\nfolder = Path('folder')\n"
        "print(output_file_problem(folder / 'x'), output_folder_problem(folder / 'x'), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", f"{source}\n{code}"], capture_output=True, text=True, check=False)
    # Only a user who may read the parent folders sees whether the folder exists.
    file, folder = done.stdout.splitlines() or pytest.fail(done.stderr)
    assert file in [f"expected a file in a folder that {what}, got folder/x" for what in ("is there", "can be written")]
    assert folder == "expected a folder that can be written, got folder/x"


def test_a_failed_write_leaves_the_old_file() -> None:
    Path("folder/file").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(Path("folder/file")) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert [path.read_bytes() for path in Path("folder").iterdir()] == [b"old"]


def test_a_write_without_room_names_the_file() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as on a full disk, no write beyond it succeeds
    try:
        with pytest.raises(OSError, match="'folder/new'$"):
            write_text(Path("folder/new"), "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(Path("folder").iterdir())


@pytest.mark.parametrize(
    "error", [TimeoutError("timed out"), ConnectionResetError(errno.ECONNRESET, "reset"), OSError("another")]
)
def test_another_error_of_the_block_names_no_file(error: OSError) -> None:
    said = str(error)
    with pytest.raises(type(error)) as raised, replacing(Path("folder/new")):
        raise error
    assert str(raised.value) == said


def test_a_name_of_the_greatest_length() -> None:
    write_text(Path("\u00e9" * 127), "text")
    assert Path("\u00e9" * 127).read_text(encoding="utf-8") == "text"


def test_a_text_makes_its_folder_and_keeps_what_is_no_utf_8() -> None:
    write_text(Path("new/deep/text"), "caf\u00e9 \udce9\n")
    assert Path("new/deep/text").read_bytes() == b"caf\xc3\xa9 \\udce9\n"
