"""What students put into files and folders: links, neighbours, sizes, names; and what a killed grader leaves."""

import errno
import io
import os
import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from submissions import LAYOUTS, scratch_folder, touch

from ece408_op.grade import __main__ as cli
from ece408_op.grade import _grading, _submission
from ece408_op.grade._grading import Log
from ece408_op.grade._spec import Spec, SpecError
from ece408_op.submission import EndedError, HarnessError, build, sources
from ece408_op.submission.sandbox import LimitsSpec, Tools


def test_links_that_lead_out_of_a_submission(tmp_path):
    touch(tmp_path, "class/ann/new-forward.h", "class/bob/own.h", "class/cat/own.h", "class/loose.h", "secret.h")
    members = tmp_path / "class"
    (members / "bob" / "new-forward.h").symlink_to(members / "ann" / "new-forward.h")
    (members / "cat" / "new-forward.h").symlink_to("own.h")
    (members / "dan").mkdir()
    (members / "dan" / "ece408_src").symlink_to(members / "ann")
    (members / "eve").symlink_to(members / "ann")
    (members / "other.h").symlink_to(members / "loose.h")
    (tmp_path / "given").symlink_to(members / "ann")
    found = {one.path.name: one.why for one in _submission.find([members, tmp_path / "given"], "cpu", lambda: False)[0]}
    assert {name for name, why in found.items() if why} == {"bob", "dan", "eve", "other.h"}
    assert all("a link that leads out" in why for why in found.values() if why)
    assert {"ann", "cat", "loose.h", "given"} < set(found)


@pytest.mark.parametrize(("given", "alone"), [(["."], True), (["ann.h", "bob.h"], True), (["ann.h"], False)])
def test_a_loose_file_of_a_class_has_no_neighbours(tmp_path, given, alone):
    (tmp_path / "ann.h").write_text('#include "bob.h"\n')
    (tmp_path / "bob.h").write_text("")
    (tmp_path / "to").mkdir()
    ((one, *_), _) = _submission.find([tmp_path / name for name in given], "cpu", lambda: False)
    assert one.source is not None and one.alone == alone
    if alone:
        with pytest.raises(EndedError, match=r"includes bob\.h, which lies next to it"):
            sources.copy(one.source, tmp_path / "to", one.alone)
    else:
        sources.copy(one.source, tmp_path / "to", one.alone)
        assert len(list((tmp_path / "to").iterdir())) == 2


def test_a_class_of_many_levels_ends(tmp_path):
    (tmp_path / "new-forward.h").write_text("")
    path = tmp_path
    for _ in range(300):
        path = path / "d"
        path.mkdir()
    (path / "deep.h").write_text("")
    with pytest.raises(SpecError):
        _submission.find([tmp_path / "d"], "cpu", lambda: False)
    found, passed_over = _submission.find([tmp_path], "cpu", lambda: False)
    assert len(found) == 1 and passed_over == []


def test_a_helper_1200_levels_deep_ends_no_class():
    with scratch_folder() as folder:
        LAYOUTS["folders 1,200 levels deep"][0](folder)
        assert _grading.key(_submission.Submission(folder, folder / "new-forward.h", "cpu"))


def test_folders_that_link_to_each_other_are_soon_listed(tmp_path):
    touch(tmp_path, "ann/new-forward.h", *(f"bob/{one}/notes.txt" for one in range(12)))
    for one in range(12):
        for other in {*range(12)} - {one}:
            (tmp_path / "bob" / str(one) / f"to {other}").symlink_to(f"../{other}")
    found, passed_over = _submission.find([tmp_path], "cpu", lambda: False)
    assert ([one.path.name for one in found], [path.name for path, _ in passed_over]) == (["ann"], ["bob"])


def test_a_name_with_a_line_break_stays_in_one_line():
    assert _grading.shown(Path("a\npassed: b\u2028c\u202ed")) == "a\\npassed: b\\u2028c\\u202ed"
    assert _grading.shown(Path("zero\u200bwidth")) == "zero\\u200bwidth"


def test_a_folder_that_is_not_graded_forges_no_line(tmp_path, capsys):
    touch(tmp_path, "own/a\npassed: b/ann/new-forward.h", "away.h")
    (tmp_path / "own" / "a\npassed: b" / "new-forward.h").symlink_to(tmp_path / "away.h")
    assert cli.main([str(tmp_path / "own"), "--context", "cpu"]) == 1
    assert all(line.startswith("ece408-grade: ") for line in capsys.readouterr().err.splitlines())
    touch(tmp_path, "none/forward\x1b[2J")
    assert cli.main([str(tmp_path / "none")]) == 2
    assert "forward\\x1b[2J" in capsys.readouterr().err


def test_another_name_is_not_shown_as_that_of_a_neighbour():
    names = ["a\nb", "a\\nb", "caf\udce9", "caf\\udce9", "a\\\nb"]
    assert len({_grading.shown(Path(name)) for name in names}) == len(names)


def test_a_python_file_is_one_whatever_its_case(tmp_path):
    (tmp_path / "KERNEL.PY").write_text("")
    ((one,), _) = _submission.find([tmp_path / "KERNEL.PY"], None, lambda: False)
    assert one.source is not None
    (tmp_path / "to").mkdir()
    program = build.build(one.source, one.context, tmp_path / "to", Tools(tmp_path), LimitsSpec())
    assert program.paths and program.what == str(tmp_path / "to" / "KERNEL.PY")


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("# unlike a CudaKernel\nKERNEL = CpuKernel('mine', 'a kernel', run)", "cpu"),
        ("from ece408_op.core.kernel import CpuKernel, CudaKernel\nKERNEL = CudaKernel('mine', 'a kernel')", "gpu"),
        ("from ece408_op.core.kernel import CudaKernel\nclass Mine(CudaKernel): pass", "gpu"),
    ],
)
def test_the_device_of_a_python_file(text, device, tmp_path):
    (tmp_path / "kernel.py").write_text(text)
    assert sources.device_of(tmp_path / "kernel.py") == device


def test_a_python_file_that_cannot_be_read_ends_no_class(tmp_path, monkeypatch):
    touch(tmp_path, "kernel.py")
    monkeypatch.setattr(_submission, "device_of", Mock(side_effect=PermissionError(13, "Permission denied")))
    ((one,), _) = _submission.find([tmp_path / "kernel.py"], "cpu", lambda: False)
    assert (one.source, one.why) == (tmp_path / "kernel.py", "")


def record(path: str) -> dict:
    return {"path": path, "status": "", "reason": "", "context": "", "networks": []}


def test_a_log_keeps_one_record_of_each_submission_for_the_same_rules(tmp_path):
    log = Log(tmp_path / "log", "rules")
    log.add("a", record("a"))
    log.add("b", record("b"))
    log.add("a", record("another"))
    log.close()
    again = Log(tmp_path / "log", "rules")
    assert again.done == {name: record(name) for name in "ab"}
    again.close()
    assert Log(tmp_path / "log", "other rules").done == {}


def test_a_log_without_room_is_named_and_keeps_what_it_has(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(Log(tmp_path / "log", "rules")) as log:
        log.add("a", record("a"))
        # As on a full disk, no write beyond it succeeds.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, before[1]))
        try:
            with pytest.raises(HarnessError, match="/log: expected room for one more record, got "):
                log.add("b", record("b" * (1 << 16)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with closing(Log(tmp_path / "log", "rules")) as log:
        assert log.done == {"a": record("a")}


@pytest.mark.parametrize("name", ["new-forward.h", "impl/own.h"])
def test_a_stopped_class_grades_a_submission_again_whose_files_have_changed(name, tmp_path):
    touch(tmp_path, "impl/own.h", "notes.txt")
    (tmp_path / "new-forward.h").write_text('#include "impl/own.h"\n')
    one = _submission.Submission(tmp_path, tmp_path / "new-forward.h", "cpu")
    before = _grading.key(one)
    (tmp_path / "notes.txt").write_text("nobody includes this")
    assert _grading.key(one) == before
    (tmp_path / name).write_text('#include "impl/own.h"\nint now;\n')
    assert _grading.key(one) != before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ELOOP])
def test_a_machine_without_room_is_no_fault_of_a_file(number, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "build", Mock(side_effect=OSError(number, os.strerror(number))))
    grader = _grading.Grader(Tools(tmp_path), Spec())
    one = _submission.Submission(tmp_path, tmp_path / "new-forward.h", "cpu")
    if number == errno.ELOOP:
        assert "the harness itself failed" in grader.grade(one)["reason"]
        return
    with pytest.raises(HarnessError, match=os.strerror(number)):
        grader.grade(one)


def test_a_record_controls_no_terminal(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "build", Mock(side_effect=EndedError("crashed", "a\x1b[2J\n\u202eb")))
    one = _submission.Submission(tmp_path, tmp_path / "new-forward.h", "cpu")
    assert _grading.Grader(Tools(tmp_path), Spec()).grade(one)["reason"] == "a\\x1b[2J\n\\u202eb"


def test_a_full_disk_behind_stdout_is_named(tmp_path, monkeypatch, capsys) -> None:
    touch(tmp_path, "new-forward.cuh")
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.main([str(tmp_path / "new-forward.cuh"), "--context", "cpu"]) == 3
    assert capsys.readouterr().err == "ece408-grade: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("content", [b"[]\n", b"{}" * 5000, b"", b"SQLite format 3\0" + b"x" * 9000, None])
def test_a_damaged_log_is_begun_again(content, tmp_path):
    log = Log(tmp_path / "log", "rules")
    log.add("a", record("a" * 9000))
    log.close()
    whole = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(whole[: len(whole) // 2] if content is None else content)
    again = Log(tmp_path / "log", "rules")
    assert again.done == {}
    again.add("b", record("b"))
    again.close()
    assert list(Log(tmp_path / "log", "rules").done) == ["b"]


def test_two_commands_do_not_write_one_log(tmp_path):
    log = Log(tmp_path / "log", "rules")
    with pytest.raises(SpecError, match="another command is writing"):
        Log(tmp_path / "log", "rules")
    log.close()
    Log(tmp_path / "log", "rules").close()


def test_a_database_that_cannot_be_used_as_a_log_stays(tmp_path):
    with closing(sqlite3.connect(tmp_path / "log")) as other:
        other.execute("CREATE TABLE records (key TEXT, points INT)")
        other.execute("INSERT INTO records VALUES ('a', 1)")
        other.commit()
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(SpecError, match="got no such column"):
        Log(tmp_path / "log", "rules")
    assert (tmp_path / "log").read_bytes() == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecError, match="got unable to open"):
        Log(tmp_path / "folder", "rules")
