"""Every command says what it does and shows an example of itself, and refuses at once what it could not write."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ece408_op import commands as commands_module

ROOT = Path(__file__).parent.parent
#: Files that run as commands, but that only other commands start.
INTERNAL = {"lab/_ncu.py", "report/machine.py", "submission/python_worker.py"}


def commands() -> list[str]:
    found = {script.name: script for script in ROOT.glob("m?.py")}
    for folder, package in ((ROOT / "ece408_op", ""), *((ROOT / name, f"{name}/") for name in ("models", "data"))):
        for path in folder.rglob("*.py"):
            found[package + path.relative_to(folder).as_posix()] = path
    return sorted(name for name, path in found.items() if _runs(path) and name not in INTERNAL)


def _runs(path: Path) -> bool:
    return 'if __name__ == "__main__":' in path.read_text(encoding="utf-8") or path.name == "__main__.py"


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the command in this process; returns its exit code."""
    monkeypatch.setattr("sys.argv", [name, *arguments])
    # Its thread would end this process on Ctrl-C.
    monkeypatch.setattr(commands_module, "guard", lambda name, work: work())
    with pytest.raises(SystemExit) as ended:
        if "/" not in name and (ROOT / name).exists():
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            module = "ece408_op." + name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
            # One that was imported before would be there twice.
            monkeypatch.delitem(sys.modules, f"{module}.__main__" if name.endswith("/__main__.py") else module, False)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    return ended.value.code


@pytest.mark.parametrize(
    "command", [*commands(), *(f"__main__.py {name}" for name in sorted(commands_module.COMMANDS))]
)
def test_help_shows_an_example(command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    name, *arguments = command.split()
    assert not run(name, [*arguments, "--help"], monkeypatch)
    printed, errors = capsys.readouterr()
    assert printed.startswith("usage: ")
    assert "example:" in printed
    assert errors == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "option", "others"),
    [
        ("m2.py", "--json", []),
        ("bench/__main__.py", "--json", []),
        ("m2.py", "--profile-out", []),
        ("profile/__main__.py", "--out", [__file__]),
        ("grade/__main__.py", "--reports", [__file__]),
        ("report/__main__.py", "--out", []),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    name: str, option: str, others: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "inside"
    assert run(name, [option, str(path), *others], monkeypatch) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    expected = "a file in a folder that is there" if option == "--json" else "a folder"
    assert f"{option}: expected {expected}, got {path}" in errors


@pytest.mark.parametrize("arguments", [[], ["m5"]])
def test_an_unknown_command_of_the_package_is_usage(arguments: list[str], monkeypatch, capsys) -> None:
    assert run("__main__.py", arguments, monkeypatch) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert "expected a command, one of m1, m2," in errors


def test_ctrl_c_ends_a_computation_that_python_cannot_interrupt() -> None:
    """The main thread waits in MXNet for a layer that takes many seconds with this kernel."""
    pytest.importorskip("mxnet")
    command = [sys.executable, str(ROOT / "m2.py"), "ece408-2018fa", "--impl", "loops"]
    # A process started in the background may inherit that SIGINT is ignored.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("Loading model... done"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "m2.py: interrupted"
    assert "Traceback" not in errors


@pytest.mark.parametrize("script", ["m1.py", "m2.py", "m3.py", "m4.py"])
def test_ctrl_c_while_a_script_imports_the_package(script: str, tmp_path: Path) -> None:
    (tmp_path / script).write_bytes((ROOT / script).read_bytes())
    (tmp_path / "ece408_op").mkdir()
    (tmp_path / "ece408_op" / "__init__.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run([sys.executable, str(tmp_path / script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{script}: interrupted\n")


#: Interrupted inside an import that hides the exception, as NumPy's does.
IN_AN_IMPORT = """
def interrupted(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("as NumPy does")
commands.import_module = interrupted
commands.{}()
"""
AT_EXIT = """
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))
sys.exit(commands.guard("tool", lambda: 0))
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [*((f"ece408-{name}", IN_AN_IMPORT.format(name)) for name in ("bench", "grade", "report")), ("tool", AT_EXIT)],
)
def test_ctrl_c_outside_a_commands_work(program: str, code: str) -> None:
    code = f"""
import atexit, os, signal, sys, time
from ece408_op import commands
signal.signal(signal.SIGINT, signal.default_int_handler)
{code}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{program}: interrupted\n")
