"""Programs are compiled together, and nothing is launched meanwhile; CuPy is a stand-in."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from process import printed

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda
from ece408_op.runtime.compile_ahead import compile_ahead
from ece408_op.runtime.launch import Plan

#: Threads that compile at the same time, which wait for each other.
TOGETHER = 2


class CompileError(Exception):
    """CuPy's."""


@pytest.fixture
def sources(monkeypatch):
    """The sources that are compiled; one that has the word "wrong" does not compile."""
    found: list[str] = []
    meet = threading.Barrier(TOGETHER, timeout=60)

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            self.code = code

        def compile(self) -> None:
            if "wrong" in self.code:
                raise CompileError(self.code)
            meet.wait()
            found.append(self.code)

    gpu = SimpleNamespace(
        Device=lambda number: nullcontext(),
        compiler=SimpleNamespace(CompileException=CompileError),
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        driver=SimpleNamespace(CUDADriverError=OSError),
        runtime=SimpleNamespace(CUDARuntimeError=OSError),
    )
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(RawModule=RawModule, cuda=gpu))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(TOGETHER))
    return found


def _program(source: str) -> cuda.Program:
    return cuda.Program("mine", source, (), Plan(defines={}, images_per_launch=1, steps=lambda images: ()))


def _launches(*programs: cuda.Program):
    arrays = {"x": SimpleNamespace(device=nullcontext())}

    def work() -> None:
        for program in programs:
            cuda.execute(program, 1, arrays, None)
            cuda.prepared_launch(program, 1, arrays)()

    return work


def test_each_source_is_compiled_once_at_the_same_time_as_others_and_kept(sources, tmp_path):
    one, other = _program(f"{tmp_path} one"), _program(f"{tmp_path} other")  # sources of this run alone
    compile_ahead(_launches(one, other, _program(one.source)), 0)
    assert sorted(sources) == [one.source, other.source]
    compile_ahead(_launches(one, other), 0)
    assert cuda.compiled(one, 0) is cuda.compiled(_program(one.source), 0)
    assert len(sources) == 2


def test_a_source_that_does_not_compile_is_named_each_time(sources):
    for _ in range(2):
        with pytest.raises(DeviceError, match="mine: expected the source to compile"):
            compile_ahead(_launches(_program("test_compile_ahead wrong")), 0)
    # Launches are launches again.
    with pytest.raises(DeviceError, match="mine: expected the source to compile"):
        cuda.prepared_launch(_program("test_compile_ahead wrong"), 1, {"x": SimpleNamespace(device=_Device())})


def test_programs_are_compiled_while_the_interpreter_exits():
    """A network's first call may still be pending then: no thread can be started."""
    assert printed("-c", _EXIT) == "compiled one\ncompiled other\n"


_EXIT = """
import atexit
from contextlib import nullcontext
from types import SimpleNamespace
from ece408_op.runtime import cuda
from ece408_op.runtime.compile_ahead import compile_ahead
from ece408_op.runtime.launch import Plan

cuda.cupy = lambda: SimpleNamespace(cuda=SimpleNamespace(Device=lambda number: nullcontext()))
compiled = []
cuda.compiled = lambda program, device: compiled.append(program.name)

@atexit.register
def at_exit():
    plan = Plan(defines={}, images_per_launch=1, steps=lambda images: ())
    programs = [cuda.Program(name, name, (), plan) for name in ("one", "other")]
    arrays = {"x": SimpleNamespace(device=None)}
    compile_ahead(lambda: [cuda.execute(program, 1, arrays, None) for program in programs], 0)
    print(*(f"compiled {name}" for name in sorted(compiled)), sep="\\n")
"""


class _Device(nullcontext):
    id = 0
