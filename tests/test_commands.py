"""Every command says what it does and shows an example of itself, and refuses at once what it could not write."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Files of the package that run as commands, but for those that only other commands start.
INTERNAL = {"report/kernels.py", "report/counters.py", "report/launch_all.py", "report/machine.py"}
INTERNAL |= {"grade/python_worker.py"}


def commands() -> list[str]:
    found = {script.name: script for script in ROOT.glob("m?.py")}
    for folder, package in ((ROOT / "ece408_op", ""), *((ROOT / name, f"{name}/") for name in ("models", "data"))):
        for path in folder.rglob("*.py"):
            found[package + path.relative_to(folder).as_posix()] = path
    return sorted(name for name, path in found.items() if _runs(path) and name not in INTERNAL)


def _runs(path: Path) -> bool:
    return 'if __name__ == "__main__":' in path.read_text(encoding="utf-8") or path.name == "__main__.py"


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the command in this process; what it exits with."""
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        if "/" not in name and (ROOT / name).exists():
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            module = "ece408_op." + name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    return ended.value.code


@pytest.mark.parametrize("name", commands())
def test_help_shows_an_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not run(name, ["--help"], monkeypatch)
    printed, errors = capsys.readouterr()
    assert printed.startswith("usage: ")
    assert "example:" in printed
    assert errors == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m2.py", "bench/__main__.py", "bench_contexts.py", "bench_network.py", "sweep.py"])
def test_a_folder_that_is_not_there_is_refused_before_any_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "out.json"
    assert run(name, ["--json", str(path)], monkeypatch) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert f"--json: expected a file in a folder that is there, got {path}" in errors
