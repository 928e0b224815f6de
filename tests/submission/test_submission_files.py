"""A submission before it runs: its files, its constants and the compiler's words; and how a program ends."""

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from process import has_ended
from sandbox import needs_sandbox
from submissions import touch

from ece408_op.core.source_lines import line_of
from ece408_op.problem import KNOWN_NETS
from ece408_op.runtime import cached_folders
from ece408_op.submission import EndedError, HarnessError, build, sandbox, sources
from ece408_op.submission.runner import compile_file
from ece408_op.submission.sandbox import Tools
from ece408_op.submission.sources import pointed_to
from ece408_op.submission.worker import Program, python_program

TOOLS = Tools(Path("/tools"))


def compiled(source: Path, tools: Tools, context: str = "cpu", architecture: str = "") -> Program:
    with build.new_folder("build") as folder:
        return build.build(source, context, folder, tools, sandbox.LimitsSpec(), architecture)


def test_the_courses_operator_is_not_compiled_with_a_file_that_includes_it(tmp_path):
    touch(tmp_path, "new-inl.h", "own.h", "others.h")
    (tmp_path / "new-forward.h").write_text('#include "./new-inl.h"\n#include "own.h"\n')
    (tmp_path / "to").mkdir()
    sources.copy(tmp_path / "new-forward.h", tmp_path / "to")
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["new-forward.h", "own.h"]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("#define H 28\nfloat a[50 * 576];", ["2017"]),
        ("// 28 x 28\n/* 576 */ int B = x.shape_[0];", []),
        ("const int TILE = 16; __shared__ float x[900];", ["2018sp"]),
        ("__constant__ float k[2400]; // as many in 2018 as in 2019", []),
        ("#define L1_IN 48\n#define L1_OUT 44\n#define L2_IN 22", ["2019sp"]),
        ("__constant__ float k[7200]; if (H == 70) f<66>(); else f<33>();", ["2019fa"]),
        ("__constant__ float k[14112]; int H = 72;", ["2018fa"]),
        ("if (H == 72) f<12, 66>(); else f<33, 27>(); if (H == 784) g();", ["2018fa", "2017"]),
        ("#define TILE_WIDTH 28\n__constant__ float k[24 * 12 * 7 * 7];", ["2018fa"]),
        ("#define ONE_OUT_TILE_WIDTH 28\nif (H == 70.0) f(66.0f);", ["2019fa"]),
    ],
)
def test_constants_point_to_a_network(source, names):
    assert [net.name for net in pointed_to(source)] == names
    assert {net.name for net in KNOWN_NETS} >= set(names)


@pytest.mark.parametrize(
    "text",
    [
        *("TILE" * 500 + "1" * 2000 + "x", "2*" * 5000 + "2", "TILE" + " " * 9000 + "x"),
        *("/*" * 117_000, "//" * 117_000 + "*/", "'\"/*\\" * 50_000, "/" * 234_000, '#include "' * 23_000),
        *("# include </" + "/include" * 30_000, "".join(f'#include "{n}"\n' for n in range(200_000))),
        *("cublasA" * 30_000, "cudnnA " * 30_000, " \t" * 117_000 + "#pragma"),
        *("int table[] = {" + "1, " * 12_000, "for(i=" * 20_000, "cudaMemcpy" * 20_000),
        "TBlob half_t TShape blas_handle_ dnn_handle_ TensorContainer\n" + ("error: " * 570 + "\n") * 250,
        "".join(f"#include <mxnet/{n}/{'d/' * 450}x.h>\n" for n in range(200)),
    ],
    ids=range(18),
)
def test_no_text_keeps_the_harness_busy(text, tmp_path):
    (tmp_path / "new-forward.h").write_text(text)
    began = time.process_time()
    pointed_to(text)
    build.arithmetic(text)
    build.not_supported(text, "\n".join(line[:4000] for line in text.splitlines()))
    build.errors("new-forward.h:1:2: error: " + text[:4000], tmp_path, TOOLS, "new-forward.h")
    (tmp_path / "to").mkdir()
    sources.copy(tmp_path / "new-forward.h", tmp_path / "to")
    sources.unroll_without_names(tmp_path / "to")
    sources.add_stubs(text, tmp_path / "stubs")
    assert sum(1 for _ in (tmp_path / "stubs").rglob("*")) < 1000
    for mistake in ("sum", "copied_bytes"):
        line_of(mistake, text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        # A missing bracket, and not that there is no forward, is what the author has to mend.
        (
            'ece408_grade/after.h(6): error: identifier "forward" is undefined\n'
            'At end of source: error: expected a "}"\n',
            'behind the end of a.cuh: error: expected a "}"',
        ),
        (
            "ece408_grade/after.h:6:3: error: 'forward' was not declared in this scope\n"
            "ece408_grade/after.h:15:2: error: expected '}' at end of input\n"
            "/build/src/a.cuh:3:17: note: to match this '{'\n",
            "a.cuh:3:17: note: to match this '{'",
        ),
        (
            "/usr/include/avxintrin.h:12:1: error: inlining failed: target specific option mismatch\n"
            "/build/src/a.cuh:17:33: note: called from here\n",
            "a.cuh:17:33: note: called from here",
        ),
        (
            "unit.cpp:(.text+0x83): undefined reference to `void mxnet::op::forward<mshadow::cpu, float>(...)'\n",
            "it has no forward(y, x, w) for this device in namespace mxnet::op that can be called",
        ),
    ],
)
def test_errors_say_what_the_author_can_mend(said, shown):
    lines = build.errors(said, Path("/build"), TOOLS, "a.cuh").splitlines()
    assert lines[-1] == shown
    assert not any("undefined reference" in line or "forward" in line and "after" in said for line in lines)


@pytest.mark.parametrize(
    "said",
    [
        "/build/src/a.cuh(3): error: no storage class\n  _global_ void k(float *error) {}\n  ^\n",
        "/build/src/a.cuh:3:1: error: no type\n    3 | _global_ void k(float *error) {}\n      | ^~~~\n",
    ],
)
def test_the_code_stands_below_its_error(said):
    code = "_global_ void k(float *error) {}"
    assert build.errors(said, Path("/build"), TOOLS, "a.cuh").splitlines()[1:] == [f"    {code}"]


def test_the_linkers_error_is_shown():
    said = "a.cuh:(.text+0x5): relocation truncated to fit: R_X86_64_PC32 against `.bss'\n"
    assert said in build.errors(f"{said}collect2: error: ld returned 1 exit status\n", Path("/build"), TOOLS, "a.cuh")


def test_a_helper_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "a.h").write_text('#include "sparse.h"\n')
    with open(tmp_path / "sparse.h", "wb") as file:
        file.truncate(6 << 30)
    (tmp_path / "to").mkdir()
    sources.copy(tmp_path / "a.h", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["a.h"]


def test_a_kernel_in_python_is_copied_with_the_sources_that_it_names(tmp_path):
    touch(tmp_path, "to/none", "class/own kernel.cu", "class/helper.h", *(f"class/{n}.h" for n in range(1000)))
    text = "source = 'kernels/own kernel.cu'\n# include <helper.h>\n" + "0" * (7 << 20)
    (tmp_path / "class" / "kernel.py").write_text(text)
    began = time.process_time()
    sources.copy(tmp_path / "class" / "kernel.py", tmp_path / "to")
    assert {path.name for path in (tmp_path / "to").iterdir()} == {"none", "kernel.py", "own kernel.cu", "helper.h"}
    assert time.process_time() - began < 3


def test_a_source_that_has_gone_is_not_called_too_large(tmp_path):
    with pytest.raises(EndedError, match="cannot be read: No such file"):
        sources.copy(tmp_path / "new-forward.h", tmp_path)


def test_folders_of_killed_graders_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = tmp_path / f"ece408-grade-{ended.pid}-case-x"
    stale.mkdir()
    with build.new_folder("case") as own:
        build.remove_folders()
        assert Path(own).exists() and not stale.exists()


def test_folders_of_the_cache_that_were_never_finished_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(cached_folders, "cache_folder", lambda: tmp_path)
    touch(tmp_path, ".tools-killed/worker", ".tools-at_work/worker", ".file-other/a")
    for name in (".tools-killed", ".file-other"):
        os.utime(tmp_path / name, (0, 0))
    cached_folders.folder(cached_folders.base(), "tools", "key", lambda to: touch(to, "worker"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file-other", ".tools-at_work", "tools-key"]


@pytest.mark.parametrize("folder", ["/tmp", "/"])
def test_a_kernel_in_python_does_not_see_the_callers_tmp(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", folder)
    monkeypatch.syspath_prepend(folder)
    seen = python_program(Path("/tmp/build/kernel.py")).seen
    assert Path(folder) not in seen and Path("/tmp/build") in seen


@needs_sandbox
def test_the_memory_of_a_program_on_a_gpu_is_seen(tmp_path):
    tools = build.tools()
    with open(tmp_path / "output", "wb") as output:
        # It looks for the beginning of a last line, and keeps all that it reads.
        command = ["/usr/bin/tail", "/dev/zero"]
        limits = sandbox.LimitsSpec(memory_bytes=200 << 20)
        process = sandbox.start(tools, command, limits, 60, output, device=0)
        while process.pages()[0] < 200 << 20:
            assert not process.wait(0.01)
    process.end()
    assert not process.runs()


@needs_sandbox
@pytest.mark.exhaustive
def test_a_program_without_a_sandbox_ends_with_its_supervisor(tmp_path):
    tools = build.tools(unsafe=True)
    with open(tmp_path / "output", "wb") as output:
        process = sandbox.start(tools, ["/bin/sleep", "60"], sandbox.LimitsSpec(), 60, output)
    process.process.kill()
    end = time.monotonic() + 30
    while process.runs() and time.monotonic() < end:
        time.sleep(0.01)
    alive = process.runs()
    process.end()
    assert not alive


@needs_sandbox
@pytest.mark.exhaustive
def test_nothing_stays_of_a_sandbox_that_is_ended_while_it_starts(tmp_path):
    """bwrap's child waits for a word of bwrap before it ends with its parent; every tenth try finds it there."""
    name, tools = f"{os.getpid()}{time.monotonic_ns()}", build.tools()
    for number in range(40):
        running = sandbox.Processes()
        closing = threading.Timer(number % 20 / 2000, running.close)
        closing.start()
        with open(tmp_path / "output", "wb") as output, suppress(HarnessError, EndedError):
            own = replace(tools, processes=running)
            sandbox.start(own, ["/bin/sleep", name], sandbox.LimitsSpec(), 60, output).end()
        closing.join()

    assert has_ended(name, 30)


def test_a_machine_without_nvcc_says_what_is_wrong_with_a_file_for_the_cpu(monkeypatch, tmp_path):
    def only_gxx(name: str) -> str:
        if name != "g++":
            raise HarnessError(f"expected the compiler {name} on this machine, found none")
        return original(name)

    original = build.compiler
    monkeypatch.setattr(build, "compiler", only_gxx)
    path = tmp_path / "new-forward.h"
    path.write_text("void cut(", encoding="utf-8")
    with pytest.raises(EndedError, match="expected"):
        compile_file(path)


@pytest.mark.parametrize(
    ("on_time", "said", "attempts", "shown"),
    [
        ([True, True], "", 2, "compile_error: the compiler failed"),
        ([False], "", 1, "timed_out"),
        ([True, False], "a.h:1: error: cut", 2, "compile_error: a.h:1: error: cut"),
        ([True, False], "a.h:1: error: this needs C++17", 2, "timed_out"),
        ([True, False], "a.h:1: error: forward is ambiguous", 2, "timed_out"),
        ([True, True, False], "a.h:1: error: forward is ambiguous", 3, "timed_out"),
    ],
)
def test_all_attempts_to_compile_share_one_limit(on_time, said, attempts, shown, monkeypatch, tmp_path):
    waited, source = [], tmp_path / "new-forward.h"
    compiler = SimpleNamespace(wait=lambda s: waited.append(s) or time.sleep(0.1) or on_time[len(waited) - 1])
    compiler.end = lambda: "exit 1"
    monkeypatch.setattr(build.sandbox, "start", lambda *_, **__: compiler)
    monkeypatch.setattr(build.sandbox, "beginning", lambda *_: said)
    source.write_text("void cut(", encoding="utf-8")
    with pytest.raises(EndedError, match=re.escape(shown)):
        compiled(source, TOOLS)
    assert len(waited) == attempts and waited[-1] <= waited[0] - 0.1 * (attempts - 1)


NO_SPACE = "#error No space left on device\n"


@needs_sandbox
@pytest.mark.parametrize(
    ("lacks", "text", "error", "said"),
    [
        ("compiler", NO_SPACE, HarnessError, "that the sandbox sees"),
        ("disk", NO_SPACE, HarnessError, "64 MB of disk for the compiler, got 1: /"),
        ("disk", "void cut(", EndedError, "expected"),
        ("disk for its message", "void cut(", HarnessError, "64 MB of disk for the compiler, got 1: /"),
    ],
    ids=["no compiler", "no disk", "little disk and an error of its own", "no disk for the linker's message"],
)
def test_what_the_compiler_lacks_is_no_fault_of_a_file(lacks, text, error, said, monkeypatch, tmp_path):
    source, tools = tmp_path / "new-forward.h", build.tools()
    source.write_text(text, encoding="utf-8")
    if lacks == "compiler":
        monkeypatch.setattr(build, "compiler", lambda name: f"/nowhere/{name}")
    else:
        monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    if lacks == "disk for its message":
        monkeypatch.setattr(build.sandbox, "beginning", lambda *_: "collect2: error: ld returned 1 exit status\n")
    with pytest.raises(error, match=said):
        compiled(source, tools)


@needs_sandbox
def test_a_name_that_no_include_takes(tmp_path):
    source = tmp_path / 'a"b>\nc\\q??!\r.h'
    source.write_text("#error seen", encoding="utf-8")
    with pytest.raises(EndedError, match=r"a_b>_c_q__!_\.h:1:2: error: #error seen"):
        compiled(source, build.tools())


@needs_sandbox
def test_a_helper_does_not_take_the_place_of_a_systems_header(tmp_path):
    (tmp_path / "string.h").write_text("#pragma once\nconst int own = 1;\n")
    source = tmp_path / "new-forward.h"
    # Only for C++14 is the header in front of the file precompiled.
    source.write_text('#include "string.h"\n#if __cplusplus < 201703L\n#error C++17\n#else\nint one = own;\n#endif\n')
    with pytest.raises(EndedError, match=r"^\w+: it has no forward\(y, x, w\)"):
        compiled(source, build.tools())


@needs_sandbox
@pytest.mark.parametrize("context", ["cpu", "gpu"])
def test_a_helper_in_a_folder_below_includes_one_at_the_top(context, tmp_path):
    if context == "gpu" and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    (tmp_path / "impl").mkdir()
    (tmp_path / "string.h").write_text("#error it takes the place of the system's\n")
    (tmp_path / "b.h").write_text('#pragma once\nconst int own = 1;\n#if 0\n#include "string.h"\n#endif\n')
    (tmp_path / "impl" / "a.h").write_text('#include "b.h"\n#include <string.h>\n')
    source = tmp_path / "new-forward.h"
    source.write_text('#include "b.h"\n#include "impl/a.h"\nint one = own;\n')
    with pytest.raises(EndedError, match=r"^\w+: it has no forward\(y, x, w\)"):
        compiled(source, build.tools(), context, "sm_90" if context == "gpu" else "")


def test_a_kernel_that_waits_for_its_own_kernels_is_not_supported():
    code = "__global__ void parent() { child<<<1, 1>>>(); cudaDeviceSynchronize(); }"
    said = 'a.cuh(6): error: calling a __host__ function("cudaDeviceSynchronize") from a __global__ function("parent")'
    assert build.not_supported(code, said) == "a kernel calls cudaDeviceSynchronize, which CUDA 12 dropped"
    assert build.not_supported(code, "a.cuh(6): error: identifier cudaDeviceSynchronise is undefined") is None
