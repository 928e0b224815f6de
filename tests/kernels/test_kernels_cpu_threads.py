"""CPU kernels in several threads at once, in a forked child and at exit."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from cpu_kernels import CPU_KERNELS, arrays, check, fitting
from process import printed

from ece408_op.problem import ConvProblem
from ece408_op.runtime.thread_pool import thread_count


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
def test_eight_calls_at_once_of_layers_not_compiled_before(kernel):
    def call(number):
        plain = ConvProblem(5, 2, 11 + number % 2, 19, 6, 3)
        results = map(partial(fitting, kernel), (plain, plain.data_gradient, plain.weight_gradient))
        taken = [result for result in results if result is not None]
        problem = taken[number // 2 % len(taken)]
        for _ in range(5):
            check(kernel, problem, *arrays(problem, number))

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(call, range(16)))) == 16


AT_EXIT = """
import atexit, os, sys
import numpy as np
from ece408_op.core import dispatch
from ece408_op.core.reference import convolve
from ece408_op.problem import ConvProblem

problem = ConvProblem(64, 3, 40, 40, 16, 5)
cases = []
for result in (problem, problem.data_gradient, problem.weight_gradient):
    a, b = (np.ones(shape, np.float32) for shape in result.shapes[:2])
    cases.append((dispatch.select(result), result, a, b, convolve(a, b, result)))

def call(word):
    for kernel, result, a, b, expected in cases:
        out = np.zeros(result.shapes[2], np.float32)
        kernel.run(result, a, b, out, 2)
        assert (out == expected).all()
    print(word, flush=True)

if "before" in sys.argv:
    call("before")
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        call("child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
if "daemon" in sys.argv:  # a call still going on when the interpreter exits
    import threading
    first = threading.Event()
    threading.Thread(target=lambda: [(call("during"), first.set()) for _ in range(1000)], daemon=True).start()
    first.wait()
else:
    atexit.register(call, "exit")
"""


@pytest.mark.parametrize("words", [[], ["before", "fork"], ["daemon"]], ids=" ".join)
def test_calls_at_exit_and_in_a_forked_child_end(words):
    lines = printed("-c", AT_EXIT, *words).split()
    if "daemon" in words:
        assert set(lines) == {"during"}
    else:
        assert lines == [{"fork": "child"}.get(word, word) for word in words] + ["exit"]


LARGE = ConvProblem(10_000, 1, 28, 28, 50, 5).flops


def test_thread_count_is_the_smallest_of_the_environment_the_cores_and_the_work(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_count(LARGE) == 16
    assert thread_count(LARGE // 5000) == 1, "too little work to wake a second thread"
    assert thread_count(ConvProblem(1, 64, 200, 200, 64, 5).flops) == 16
    for asked, threads in [("5", 5), ("32", 16), ("4,2", 4), ("0", 16), ("many", 16), ("", 16)]:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert thread_count(LARGE) == threads
