"""The grader's file, the paths given, and the command's exit codes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sandbox import needs_sandbox
from submissions import graded, touch

from ece408_op.errors import DeviceError
from ece408_op.grade import __main__ as cli
from ece408_op.grade import _grading, _reports, _spec, _submission
from ece408_op.grade._spec import SpecError
from ece408_op.runtime import cuda

HERE = Path(__file__).parents[1] / "submissions"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("networks = ['2016']", "2016"),
        ("images = [0]", "from 1 to"),
        ("images = 'all'", "list of int"),
        ("half = 1", "true or false"),
        ("[ranking]\nmix_precisions = 1", "true or false"),
        ("runs = true", "runs"),
        (f"runs = -1{'0' * 400}", "runs: expected a number from 1 to 100000"),
        ("runs = 1000000000", "runs: expected a number from 1 to 100000"),
        ("[limits]\nbuild_seconds = 1e10", "build_seconds: expected a number from 0.001 to"),
        (f"[limits]\nbuild_seconds = 1{'0' * 400}", "build_seconds: expected a number from 0.001 to"),
        (f"[limits]\nmemory_bytes = 1{'0' * 20}", "memory_bytes: expected a number from 0.001 to"),
        (f"a = {'[' * 5000}", "expected TOML"),
        ("network = [{ name = 'a\\nb', layers = [[1, 9, 9, 1, 3]] }]".replace("'", '"'), "expected a name"),
        (f"network = [{{ name = 'a', layers = [{'[1, 9, 9, 1, 3], ' * 51}] }}]", "at most 50 layers, got 51"),
        ("colour = 1", "images, limits, network, networks, ranking, runs, seed, got colour"),
        ("[limits]\nrun_second = 1", "run_second"),
        ("[limits]\nrun_seconds = -1", "run_seconds"),
        ("[limits]\nrun_seconds = 0", "run_seconds"),
        ("[limits]\nload_seconds = nan", "load_seconds"),
        ("networks = ['2017', '2017']", "differ"),
        ("network = [{ name = 'a', layers = [[1, 2, 3]] }]", "channels, height, width, filters, kernel"),
        ("network = [{ name = 'a', layers = [[1, 4, 4, 1, 5]] }]", "kernel"),
        ("images = [", "TOML"),
        ("images = [1]\xff", "expected TOML"),
    ],
)
def test_a_bad_file_names_the_key(text, said, tmp_path, capsys):
    path = tmp_path / "spec.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError, match=said):
        _spec.load(path)
    assert cli.main([str(HERE / "cpu" / "textbook.h"), "--spec", str(path)]) == 2
    assert said in capsys.readouterr().err


@needs_sandbox
@pytest.mark.parametrize("large", ["images = [100000000]", f"images = [100, 1{'0' * 18}]", "network = [{NET}]"])
def test_batches_beyond_the_memory_are_refused_at_the_beginning(large, tmp_path, capsys):
    net = "name = 'own', layers = [[1, 100000, 100000, 100, 5]]"
    (path := tmp_path / "spec.toml").write_text(large.replace("NET", net))
    assert cli.main([str(HERE / "cpu" / "textbook.h"), "--spec", str(path)]) == 2
    assert re.fullmatch(r"ece408-grade: images: expected batches that fit .* GiB\n", capsys.readouterr().err)


def test_a_whole_file(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(
        "networks = ['2018fa']\nimages = [7, 100]\nruns = 9\nhalf = false\nseed = 5\n[limits]\nmemory_bytes = 1000\n"
        "[[network]]\nname = 'own'\nlayers = [[3, 9, 8, 4, 2]]\n[ranking]\nbest = 30\n"
    )
    got = _spec.load(path)
    assert [net.name for net in got.nets] == ["2018fa", "own"]
    assert (got.images, got.runs, got.half, got.seed) == ((7, 100), 9, False, 5)
    assert (got.limits.memory_bytes, got.ranking.best, got.demanding) == (1000, 30.0, True)
    path.write_bytes(b"\xef\xbb\xbfruns = 9\r\n")  # as Windows' editor writes it
    assert _spec.load(path).runs == 9


def test_without_a_file_the_seed_is_another_each_time():
    assert _spec.Spec().seed != _spec.Spec().seed


def found_in(folder: Path, context: str | None = "cpu", gpu: bool = False) -> tuple[list[str], list[str]]:
    """The submissions, as device and source, and the paths that are passed over, both from the folder."""
    found, passed_over = _submission.find([folder], context, lambda: gpu)
    sources = [f"{one.context}: {one.source.relative_to(folder) if one.source else None}" for one in found]
    return sources, [str(path.relative_to(folder)) for path, _ in passed_over]


def test_folders_and_files(tmp_path):
    touch(tmp_path, "a/ece408_src/new-forward.h", "a/ece408_src/new-forward.cuh", "b/new-forward.cuh", "loose.cu")
    ones = ["cpu: a/ece408_src/new-forward.h", "gpu: b/new-forward.cuh", "gpu: loose.cu"]
    assert found_in(tmp_path, None)[0] == ones
    assert found_in(tmp_path, None, gpu=True)[0] == ["gpu: a/ece408_src/new-forward.cuh", *ones[1:]]
    assert found_in(tmp_path, gpu=True)[0] == [ones[0], "cpu: None"]
    (tmp_path / "final.py").write_text("")
    assert len(found_in(tmp_path, None, gpu=True)[0]) == 3


def test_a_folder_without_a_submission_says_what_else_it_has(tmp_path):
    touch(tmp_path, "a/notes.txt", "kernel.py")
    with pytest.raises(SpecError, match=r"found none; .*/a: no submission found.*kernel\.py: .* give its own path"):
        _submission.find([tmp_path], None, lambda: False)


def test_two_paths_to_one_submission_are_one(tmp_path, monkeypatch):
    touch(tmp_path, "class/ann/new-forward.h", "class/bob/new-forward.h")
    monkeypatch.chdir(tmp_path)
    paths = [Path("class"), tmp_path / "class", Path("class/ann"), Path("class/../class/bob")]
    found, _ = _submission.find(paths, "cpu", lambda: False)
    assert [one.path for one in found] == [Path("class/ann"), Path("class/bob")]


def test_what_holds_no_submission_is_told_of(tmp_path):
    touch(tmp_path, "a/new-forward.h", "b/README.md", "c/deep/new-forward.h", "d.zip", "e.txt", "f/src/g.tgz")
    touch(tmp_path, "__MACOSX/a/ece408_src/._new-forward.h", "c/new-inl.h", "c/new.cc")
    (tmp_path / "c" / "home").symlink_to(tmp_path)
    ones = ["cpu: a/new-forward.h", "cpu: c/deep/new-forward.h"]
    assert found_in(tmp_path) == (ones, ["b", "c/home", "d.zip", "f"])
    _, passed_over = _submission.find([tmp_path], "cpu", lambda: False)
    assert passed_over[-1][1] == "src: g.tgz: an archive; unpack it first"
    with pytest.raises(SpecError, match="unpack"):
        _submission.find([tmp_path / "d.zip"], None, lambda: False)


def test_a_file_that_is_no_submission_is_not_compiled(tmp_path):
    touch(tmp_path, "roster.csv", "new-forward.txt")
    with pytest.raises(SpecError, match=r"roster\.csv: expected a folder or a file of \.h, .*, \.py, got another file"):
        _submission.find([tmp_path / "roster.csv"], None, lambda: False)
    assert len(_submission.find([tmp_path / "new-forward.txt"], None, lambda: False)[0]) == 1


def test_files_next_to_a_class_are_left_out_and_told_of(tmp_path):
    touch(tmp_path, "ann/new-forward.h", "k.cxx", "k.inl", "notes.txt", "roster.csv")
    found, passed_over = _submission.find(sorted(tmp_path.iterdir()), None, lambda: False)
    assert [(one.path.name, one.context) for one in found] == [("ann", "cpu"), ("k.cxx", "cpu"), ("k.inl", "cpu")]
    assert [path.name for path, why in passed_over if why.endswith("got another file")] == ["notes.txt", "roster.csv"]
    with pytest.raises(SpecError, match=r"notes\.txt: expected .*; .*roster\.csv: expected a folder"):
        _submission.find([tmp_path / "notes.txt", tmp_path / "roster.csv"], None, lambda: False)


def test_whoever_is_left_out_further_down_or_next_to_a_skeleton_is_named(tmp_path):
    touch(tmp_path, "s1/ann/new-forward.h", "s1/bob/notes.txt", "s1/dan.zip", "s2/Eve/New-Forward.H", "gus.py")
    touch(tmp_path, "top/new-forward.h", "top/hal/new-forward.h", "top/data/x.csv", "s2/ida.h.txt", "s2/forward.txt")
    ones = ["cpu: s1/ann/new-forward.h", "cpu: s2/Eve/New-Forward.H", "cpu: top/new-forward.h"]
    assert found_in(tmp_path) == (ones, ["gus.py", "s1/bob", "s1/dan.zip", "s2/forward.txt", "top/hal"])
    assert found_in(tmp_path / "top") == (["cpu: new-forward.h"], ["hal"])


def test_the_courses_own_files_are_no_submission(tmp_path):
    touch(tmp_path / "a" / "ece408_src", "new-inl.h", "new.cc", "new.cu", "._old.h", "old.h")
    touch(tmp_path, "b/new-forward.h")
    (tmp_path / "b" / "ece408_src").mkdir()
    assert found_in(tmp_path, gpu=True)[0] == ["cpu: a/ece408_src/old.h", "cpu: b/new-forward.h"]
    assert found_in(tmp_path, "gpu", gpu=True)[0] == ["gpu: None"] * 2


@needs_sandbox
def test_what_cannot_be_read_ends_no_class(tmp_path, capsys):
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / "broken.h").symlink_to(folder / "nowhere")
    (folder / "large.h").write_bytes(b"// x\n" * (1 << 21))
    os.mkfifo(folder / "pipe.h")
    (folder / "wide.h").write_bytes("#include <mxnet/base.h>\n".encode("utf-16"))
    # A name from another system, whose bytes are no UTF-8.
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.h")).write_text("#include <not/finished>\n")
    code, records = graded([folder], tmp_path, "", "--context", "cpu", "--reports", str(tmp_path / "reports"))
    assert code == 1
    statuses = {record["path"].rpartition("/")[2]: record["status"] for record in records}
    names = ("broken.h", "large.h", "pipe.h", "wide.h", "caf\\udce9.h")
    assert statuses == dict(zip(names, ["unsupported"] * 3 + ["compile_error"] * 2))
    lines = [line.split(": ") for line in capsys.readouterr().out.splitlines() if str(folder) in line]
    assert {path.rpartition("/")[2]: status for status, path, *_ in lines} == statuses
    assert len(list((tmp_path / "reports" / "students").glob("*.html"))) == 5


#: Files that are no submission at all: text, status, and a part of the reason.
NONE_AT_ALL = [
    ("\n", "compile_error", "is empty"),
    ("__global__ void k(float *y) {}\n", "compile_error", "it holds a kernel in CUDA"),
    ("#include <torch/extension.h>\n", "unsupported", "it is written for PyTorch"),
    ("#include <mxnet/base.h>\nmxnet::TBlob *b;\n", "unsupported", "it uses TBlob of MXNet"),
    ('#include "/usr/local/cuda-8.0/include/math_functions.hpp"\n', "compile_error", "it has no forward"),
    (f"#include </{'a' * 300}/include/{'x' * 300}.h>\n", "compile_error", "fatal error"),
    ("#include <mxnet/a.h>\n#include <mxnet/a.h/b.h>\n", "compile_error", "a.h/b.h"),
    ("// __global__ torch::Tensor\nint a = scalar\n", "compile_error", "'scalar' was not declared"),
]


@pytest.fixture(scope="module")
def reasons(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    for number, (text, _, _) in enumerate(NONE_AT_ALL):
        (folder / str(number)).mkdir()
        (folder / str(number) / "new-forward.h").write_text(text)
    code, records = graded([folder], tmp_path_factory.mktemp("out"), "", "--context", "cpu")
    assert code == 1
    return [(record["status"], record["reason"]) for record in records]


@needs_sandbox
@pytest.mark.parametrize("number", range(len(NONE_AT_ALL)))
def test_files_that_are_no_submission_at_all(number, reasons):
    (status, reason), (_, right, said) = reasons[number], NONE_AT_ALL[number]
    assert status == right and said in reason, reason
    assert "ece408_grade" not in reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_passed_over(tmp_path):
    (tmp_path / "one" / "private").mkdir(parents=True)
    (tmp_path / "one" / "new-forward.h").write_text("")
    (tmp_path / "one" / "private").chmod(0)
    found, passed_over = _submission.find([tmp_path / "one"], "cpu", lambda: False)
    assert len(found) == 1 and passed_over == []


@needs_sandbox
def test_without_a_gpu_a_class_is_graded_as_far_as_it_goes(tmp_path, capsys, monkeypatch):
    none = DeviceError("the GPU: expected at least one NVIDIA GPU, got none")
    monkeypatch.setattr(cuda, "device_count", mock.Mock(side_effect=none))
    (tmp_path / "a.cuh").write_text("")
    assert cli.main([str(tmp_path / "a.cuh")]) == 3
    assert "GPU" in capsys.readouterr().err
    (tmp_path / "b.h").write_text("#include <not/finished>\n")
    assert cli.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("unsupported") and "NVIDIA GPU" in out[0]
    assert out[1].startswith("compile_error")
    assert cli.main([str(tmp_path / "a.cuh"), "--context", "cpu"]) == 1
    assert "a.cuh is for --context gpu" in capsys.readouterr().out


def test_nothing_is_built_where_no_file_is_for_the_device(tmp_path, capsys):
    touch(tmp_path, "ann/new-forward.h")
    assert cli.main([str(tmp_path), "--context", "gpu"]) == 1  # without a GPU and its compiler, too
    assert "unsupported" in (out := capsys.readouterr().out) and "holds no new-forward.cuh" in out


def test_reports_need_a_folder_that_can_be_filled(tmp_path, capsys):
    touch(tmp_path, "students")
    assert cli.main([str(HERE / "cpu" / "textbook.h"), "--reports", str(tmp_path)]) == 2
    assert "students" in capsys.readouterr().err


@needs_sandbox
def test_a_stopped_class_continues_with_the_same_options_only(tmp_path, monkeypatch):
    (tmp_path / "a.h").write_text("#include <not/finished>\n")
    arguments = [str(tmp_path / "a.h"), "--json", str(tmp_path / "out.json"), "--reports", str(tmp_path / "reports")]
    seen = []

    def interrupted(folder: Path, records: list[dict[str, Any]], rules: object) -> None:
        seen.append(records[0]["started"])
        raise KeyboardInterrupt

    monkeypatch.setattr(_reports, "write_all", interrupted)
    for options in (["--quick"], ["--quick"], []):
        assert cli.main([*arguments, *options]) == 130
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize(
    ("place", "name", "error", "code", "said"),
    [
        (_grading.Log, "add", DeviceError("out.json.log: expected room"), 3, "out.json.log: expected room"),
        (_submission, "find", KeyboardInterrupt, 130, "interrupted; the same command continues where it stopped"),
    ],
    ids=["full disk", "interrupted"],
)
def test_what_stops_the_command_is_said_in_a_line(place, name, error, code, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(place, name, mock.Mock(side_effect=error))
    assert cli.main([str(HERE / "gpu" / "naive.cuh"), "--context", "cpu", "--json", str(tmp_path / "out.json")]) == code
    assert capsys.readouterr().err == f"ece408-grade: {said}\n"


def test_a_reason_begins_no_line_of_its_own():
    record = {"status": "compile_error", "networks": [], "path": "a.h"}
    record["reason"] = "a.h:1: error\npassed (float32): b.h:2:"
    assert cli.line(record) == "compile_error: a.h: a.h:1: error\n    passed (float32): b.h:2:"
    assert _grading.escaped("a\x1b[2J\u202eb\n", kept="\n") == "a\\x1b[2J\\u202eb\n"
