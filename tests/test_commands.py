"""Every command says what it does and shows an example of itself, and refuses at once what it could not write."""

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process import printed as output_of
from process import python

from ece408_op import commands as commands_module
from ece408_op.core import dispatch
from ece408_op.plugin import bridge

ROOT = Path(__file__).parent.parent
#: Files that run as commands, but that only other commands start.
CONTEXTS = ("", " --context cpu", " --context gpu")
INTERNAL = {"lab/_ncu.py", "submission/python_worker.py"}


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
def test_help_shows_an_example(command, tmp_path, monkeypatch, capsys):
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
    name, option, others, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "inside"
    assert run(name, [option, str(path), *others], monkeypatch) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    expected = "a file in a folder that is there" if option == "--json" else "a folder"
    assert f"{option}: expected {expected}, got {path}" in errors


ALL = "(?s)" + "".join(f"(?=.*{name})" for name in dispatch.names("gpu"))
#: Commands that the package does not list.
OTHERS = {"profile": "profile/__main__.py", "train": "models/train.py"}
#: Command lines in which {file} is a file that is there, and words of the error.
WRONG = [
    ("", "expected a command, one of m1, m2,"),
    ("m5", "expected a command, one of m1, m2,"),
    ("m1 resnet", "expected one of .*ece408-high.*got 'resnet'"),
    ("m2 0", "from 1 to 10000, got '0'"),
    ("m2 ece408-low 10001", "from 1 to 10000, got '10001'"),
    ("m2 -5", "."),
    (f"m2 {'9' * 5000}", "SIZE: expected a whole number from 1 to 10000, got '999"),
    ("m2 ece408-low many", "got 'many'"),
    ("m2 ece408-low 1 2", "at most MODEL and SIZE"),
    ("m2 --impl fastest", "fastest.*direct"),
    ("m2 --impl nowhere.h", "expected the path of a file, found no nowhere.h"),
    (f"m2 1 --impl {ROOT}/tests/submissions/gpu/naive.cuh", "expected a file for the cpu, .*; run it with m3.py or m4"),
    (f"m2 1 --impl {ROOT}/tests/submissions/cpu/textbook.h --fuse", "a file is not fused"),
    *((f"{name} 10 --impl {kernel}", ALL) for name in ("m3", "m4") for kernel in ("fastest", "direct")),
    *((f"{name} 10 --fuse --impl all", "--fuse: expected one kernel, got all") for name in ("m3", "m4")),
    ("m4 --precision int4", "float32.*tf32.*fp16"),
    ("m2 --json /nowhere/m2.json", "--json: expected a file in a folder that is there"),
    ("m2 --json /", "--json: expected a file, got the folder /"),
    ("m2 --json=", "--json: expected a file, got the folder"),
    ("bench --layer 2016", "expected 2017, 2018sp-1"),
    ("bench --layer 3x4x4x2x5", "kernel: expected at most"),
    ("bench --images 0", "expected a whole number of at least 1, got '0'"),
    ("bench --images all", "expected a whole number of at least 1, got 'all'"),
    (f"bench --images {'9' * 5000}", "expected a whole number of at least 1, got '999"),
    ("bench --layer 1x40000x40000x1x3 --images 9", "--images: expected arrays .* got 14400000000 elements"),
    ("bench --threads 100000", "from 1 to 1024, got '100000'"),
    ("bench networks --images 10001", "--images: expected at most 10000 with ece408-high, got 10001"),
    ("bench --impl fastest", "expected one of auto, winograd, winograd_gemm, col2im"),
    ("bench --impl naive", r"expected one for the cpu \(auto,"),
    ("bench --context gpu --impl direct", r"expected one for the gpu \(auto,"),
    ("bench --precision fp16", "--context gpu has the others"),
    ("bench --split-form", "--split-form: expected --context gpu"),
    ("bench --random 100000000", "--random: expected a whole number from 1 to 10000"),
    ("bench sweep --again --random 3", "--again: expected no --random"),
    ("bench sweep --again --images 10000", "--again: expected no --images"),
    ("bench networks --gpus 2", "--gpus: expected --training"),
    ("bench sweep --seed -1", "expected a whole number from 0 to 4294967295, got '-1'"),
    ("bench sweep --impl nothing", "register_tiled"),
    ("bench networks --network alex", "alex"),
    ("bench one-image --json /nowhere/bench.json", "expected a file in a folder that is there, got"),
    ("bench networks --plots {file}/plots", "--plots: expected a folder, got .*/plots"),
    ("grade nowhere", "nowhere: expected a file or a folder, found nothing"),
    (f"grade {'x' * 5000}", "x: expected a file or a folder, found nothing"),
    ("grade ''", "path: expected a path, got an empty word"),
    ("grade {file} --reports ''", "--reports: expected a path, got an empty word"),
    ("grade .", "expected new-forward.h, .* found none"),
    ("grade {file} --json /nowhere/out.json", "--json: expected a file in a folder that is there"),
    ("grade {file} --json /", "--json: expected a file, got the folder /"),
    ("lab nowhere.h", ".py, got nowhere.h"),
    ("lab {file} --layer 1x2x3", "expected five sizes such as 1x28x28x50x5, got '1x2x3'"),
    ("lab {file} --layer 1x3x3x1x5", "at most the image's 3 rows"),
    ("lab {file} --images 0", "from 1 to 10000"),
    ("lab {file} --images ²", "from 1 to 10000, got '²'"),
    ("lab new nowhere/own.cu", "expected a file in a folder that is there, got nowhere/own.cu"),
    ("lab {file} --json /nowhere/x.json", "--json: expected a file in a folder that is there"),
    ("report --out x --networks resnet", "'resnet'.*ece408-high"),
    ("report --out x --sizes 0", "a whole number from 1 to 10000, got '0'"),
    ("report --out x --limit 1h", "a whole number from 1 to 1000000, got '1h'"),
    ("report --out x --sizes all", "a whole number from 1 to 10000, got 'all'"),
    ("report --out x --impl fastest", "fastest"),
    ("report --out x --milestones m5", "m5"),
    ("profile nowhere.py", "nowhere.py"),
    ("train nobody", "expected names among baseline, ece408-high"),
]


@pytest.mark.parametrize(("command", "words"), WRONG)
def test_what_is_wrong_in_a_command_line_is_named(command, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (tmp_path / "own.h").touch()
    arguments = shlex.split(command.format(file=tmp_path / "own.h"))
    script = OTHERS.get(arguments[0]) if arguments else None
    assert run(script or "__main__.py", arguments[bool(script) :], monkeypatch) == 2
    printed, errors = capsys.readouterr()
    assert printed == "" and "Traceback" not in errors
    assert re.search(words, errors), errors
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.skipif(bridge.gpu_problem("host") is None, reason="this machine has a GPU")
@pytest.mark.parametrize(
    "command",
    [
        *("bench --context gpu", "bench one-image --context gpu", "bench transfers", "bench sweep"),
        *("m1 10 --context gpu", *(f"{name} 10{where}" for name in ("m3", "m4") for where in CONTEXTS)),
    ],
)
def test_without_a_gpu_one_sentence_and_exit_code_3(command, monkeypatch, capsys):
    pytest.importorskip("mxnet")
    assert run("__main__.py", command.split(), monkeypatch) == 3
    printed, errors = capsys.readouterr()
    assert (printed, errors.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("command", "package"),
    [("report --out x", "jinja2"), ("report --out x", "matplotlib"), ("bench --plots plots", "matplotlib")],
)
def test_without_the_extra_one_sentence_says_what_to_install(command, package, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert run("__main__.py", command.split(), monkeypatch) == 3
    printed, errors = capsys.readouterr()
    assert (printed, errors.count("\n")) == ("", 1)
    assert re.search(rf"expected (Jinja2|matplotlib) .*, got .*{package}.*; pip install", errors)
    assert "pip install" in errors and list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_computation_that_python_cannot_interrupt():
    """The main thread waits in MXNet for a layer that takes many seconds with this kernel."""
    pytest.importorskip("mxnet")
    command = [sys.executable, str(ROOT / "m2.py"), "ece408-2018fa", "3000", "--impl", "loops"]
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
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "m2.py: interrupted"
    assert "Traceback" not in errors


@pytest.mark.parametrize("script", ["m1.py", "m2.py", "m3.py", "m4.py"])
def test_ctrl_c_while_a_script_imports_the_package(script, tmp_path):
    (tmp_path / script).write_bytes((ROOT / script).read_bytes())
    (tmp_path / "ece408_op").mkdir()
    (tmp_path / "ece408_op" / "__init__.py").write_text("raise KeyboardInterrupt")
    done = python(tmp_path / script)
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
BEFORE_THE_WORK = """
start = commands.threading.Thread.start
commands.threading.Thread.start = lambda thread: (os.kill(os.getpid(), signal.SIGINT), start(thread))
sys.exit(commands.guard("tool", lambda: 0))
"""
AT_EXIT = """
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(600)))
sys.exit(commands.guard("tool", lambda: 0))
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        *((f"ece408-{name}", IN_AN_IMPORT.format(name)) for name in ("bench", "grade", "report")),
        *(("tool", BEFORE_THE_WORK), ("tool", AT_EXIT)),
    ],
)
def test_ctrl_c_outside_a_commands_work(program, code):
    code = f"""
import atexit, os, signal, sys, time
from ece408_op import commands
signal.signal(signal.SIGINT, signal.default_int_handler)
{code}"""
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{program}: interrupted\n")


@pytest.mark.parametrize("name", ["bench", "grade", "lab", "profile", "report"])
def test_ctrl_c_while_a_module_that_runs_as_a_command_imports(name, tmp_path):
    (tmp_path / "numpy.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    code += f"runpy.run_module('ece408_op.{name}', run_name='__main__', alter_sys=True)"
    done = python("-c", code, first=[tmp_path])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"ece408-{name}: interrupted\n")


#: A command that takes a broken pipe for a file's error.
PRINTS = """
import sys
from types import SimpleNamespace
from ece408_op import commands
def main():
    try:
        commands.print_lines(map(str, range(100_000)))
        print("x" * 10_000, file=sys.stderr)
    except OSError as error:
        return commands.FAILED
    return commands.OK
commands.import_module = lambda name: SimpleNamespace(main=main)
sys.exit(commands.{}())
"""


@pytest.mark.parametrize("name", ["bench", "grade"])
def test_a_reader_that_has_ended_is_no_error(name):
    command = [sys.executable, "-c", PRINTS.format(name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT) as process:
        assert process.stdout and process.stdout.read(2) == b"0\n"
        process.stdout.close()
        assert process.wait() == 0


@pytest.mark.parametrize("closed", ["1>&-", "2>&-"])
def test_a_closed_stream_is_no_error(closed):
    code = "import sys; from ece408_op.commands import guard, print_lines; guard('x', lambda: print_lines('ab'));"
    code += "sys.stderr.write('e'); sys.stdout.write('o')"
    shell = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, *(("", "e") if closed == "1>&-" else ("a\nb\no", "")))


def test_a_terminal_that_is_closed_ends_a_command_that_cleans_up(tmp_path):
    code = """
import fcntl, os, sys, tempfile, termios, time
from ece408_op import commands
fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)
for number in (0, 1, 2):
    os.dup2(int(sys.argv[1]), number)
def work():
    commands.interrupt_on_sigterm()
    with tempfile.TemporaryDirectory(dir=sys.argv[2]):
        print("begun")
        time.sleep(60)
sys.exit(commands.guard("command", work))
"""
    mine, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(its), str(tmp_path)], pass_fds=[its], start_new_session=True, cwd=ROOT
    )
    os.close(its)
    try:
        assert os.read(mine, 5) == b"begun"
        assert len(list(tmp_path.iterdir())) == 1
        os.close(mine)
        assert process.wait(20) == 129
    finally:
        process.kill()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM)])
def test_a_second_signal_leaves_the_clean_up_alone(first, second):
    code = """
import os, sys, time
from ece408_op import commands
def work():
    commands.interrupt_on_sigterm()
    try:
        os.write(1, b"begun\\n")  # a signal inside of print would have it write twice
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        sys.stdin.readline()
        print("cleaned")
sys.exit(commands.guard("command", work))
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout and process.stdout.readline() == "begun\n"
        process.send_signal(first)
        assert process.stdout.readline() == "cleaning\n"
        process.send_signal(second)
        assert process.communicate("\n")[0] == "cleaned\n"
    assert process.returncode == 128 + first


def test_only_the_reader_of_stdout_counts():
    code = """
import sys, time
from ece408_op import commands
def work():
    print("for stderr", file=sys.stderr)
    print(commands.is_read(), flush=True)
    end = time.monotonic() + 20
    while commands.is_read() and time.monotonic() < end:
        time.sleep(0.01)
    return commands.is_read()
sys.exit(commands.guard("command", work))
"""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, cwd=ROOT) as process:
        os.close(writer)
        assert process.stdout and process.stdout.readline() == b"True\n"
        process.stdout.close()
    assert process.returncode == 0


def test_lines_beyond_an_encoding_are_escaped():
    code = "from ece408_op.commands import print_lines; print_lines(['\\u540d'])"
    assert output_of("-c", code, PYTHONIOENCODING="ascii") == "\\u540d\n"
