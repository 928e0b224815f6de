"""The grader's file, the paths given, and the command's exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ece408_op import cuda
from ece408_op.errors import DeviceError
from ece408_op.grade import cli, spec, submission
from ece408_op.grade.errors import SpecError
from ece408_op.grade.networks import NETS, pointed_to

HERE = Path(__file__).with_name("submissions")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("networks = ['2016']", "2016"),
        ("images = [0]", "at least 1"),
        ("images = 'all'", "list of int"),
        ("half = 1", "true or false"),
        ("runs = true", "runs"),
        ("colour = 1", "colour"),
        ("[limits]\nrun_second = 1", "run_second"),
        ("[limits]\nrun_seconds = -1", "run_seconds"),
        ("network = [{ name = 'a', layers = [[1, 2, 3]] }]", "channels, height, width, filters, kernel"),
        ("network = [{ name = 'a', layers = [[1, 4, 4, 1, 5]] }]", "kernel"),
        ("images = [", "TOML"),
    ],
)
def test_a_bad_file_names_the_key(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said):
        spec.load(path)
    assert cli.main([str(HERE / "cpu" / "textbook.h"), "--spec", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(
        "networks = ['2018fa']\nimages = [7, 100]\nruns = 9\nhalf = false\nseed = 5\n[limits]\nmemory_bytes = 1000\n"
        "[[network]]\nname = 'own'\nlayers = [[3, 9, 8, 4, 2]]\n[ranking]\nbest = 30\n"
    )
    got = spec.load(path)
    assert [net.name for net in got.nets] == ["2018fa", "own"]
    assert (got.images, got.runs, got.half, got.seed) == ((7, 100), 9, False, 5)
    assert (got.limits.memory_bytes, got.ranking.best, got.demanding) == (1000, 30.0, True)


def test_without_a_file_the_seed_is_another_each_time() -> None:
    assert spec.Spec().seed != spec.Spec().seed


def test_a_missing_path_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(tmp_path / "nowhere")]) == 2
    assert cli.main([str(tmp_path)]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_folders_and_files(tmp_path: Path) -> None:
    for name in ("a/ece408_src/new-forward.h", "a/ece408_src/new-forward.cuh", "b/new-forward.cuh", "loose.cu"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def found(context: str | None, gpu: bool) -> list[tuple[str, str, str]]:
        here = submission.find([tmp_path], context, lambda: gpu)
        return [(one.path.name, one.context, one.source.name if one.source else "") for one in here]

    assert found(None, False) == [
        ("a", "cpu", "new-forward.h"),
        ("b", "gpu", "new-forward.cuh"),
        ("loose.cu", "gpu", "loose.cu"),
    ]
    assert found(None, True)[0] == ("a", "gpu", "new-forward.cuh")
    assert found("cpu", True) == [("a", "cpu", "new-forward.h"), ("b", "cpu", "")]
    (tmp_path / "final.py").write_text("")
    assert len(found(None, True)) == 3


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("#define H 28\nfloat a[50 * 576];", ["2017"]),
        ("// 28 x 28\n/* 576 */ int B = x.shape_[0];", []),
        ("const int TILE = 16; __shared__ float w[2400];", ["2018sp"]),
        ("__constant__ float k[14112]; int H = 72;", ["2018fa"]),
        ("if (H == 72) f<12, 66>(); else f<33, 27>(); if (H == 784) g();", ["2018fa", "2017"]),
    ],
)
def test_constants_point_to_a_network(source: str, names: list[str]) -> None:
    assert [net.name for net in pointed_to(source)] == names
    assert {net.name for net in NETS} >= set(names)


def test_without_a_gpu_a_class_is_graded_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> int:
        raise DeviceError("the GPU: expected at least one NVIDIA GPU, got none")

    monkeypatch.setattr(cuda, "device_count", none)
    (tmp_path / "a.cuh").write_text("")
    assert cli.main([str(tmp_path / "a.cuh")]) == 3
    assert "GPU" in capsys.readouterr().err
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (tmp_path / "b.h").write_text("#error not finished\n")
    assert cli.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("unsupported") and "NVIDIA GPU" in out[0]
    assert out[1].startswith("compile_error")
    assert cli.main([str(tmp_path / "a.cuh"), "--context", "cpu"]) == 1
    assert "a.cuh is for --context gpu" in capsys.readouterr().out
