"""The documentation: its programs run, its tables are those of the results, what it names exists, it is short."""

import importlib.util
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from gpu_case import require_gpu
from nvrtc import needs_nvrtc
from process import printed
from text_changes import changed

import ece408_op
from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TUTORIAL = (DOCS / "writing-a-kernel.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 16_000
#: Files whose links and paths are checked.
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/README.md"))]
#: The files of the code, by their paths in the checkout.
FOLDERS = ("ece408_op", "kernels", "models", "data", "tests", "benchmarks")
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("m?.py", *(f"{folder}/**/*" for folder in FOLDERS))
    for path in ROOT.glob(pattern)
    if path.is_file() and "submissions" not in path.parts
]
each_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())


def blocks(kind: str) -> list[tuple[str, str]]:
    """(argument, text) of each fenced block of the tutorial that follows a comment <!-- kind: argument -->."""
    return re.findall(rf"^<!-- {kind}: (\S+) -->\n```\w+\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout in which the tutorial has been followed."""
    copy = tmp_path_factory.mktemp("tutorial")
    ignored = shutil.ignore_patterns("__pycache__", "submissions", "*-ubyte", "*-ubyte.gz")
    for folder in ("ece408_op", "kernels", "models", "data", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name, text in blocks("file"):
        assert not (copy / name).exists(), name
        (copy / name).write_text(text, encoding="utf-8")
    for name, difference in blocks("change"):
        file = copy / name
        file.write_text(changed(file.read_text(encoding="utf-8"), difference), encoding="utf-8")
    return copy


def run(checkout: Path, *arguments: str) -> str:
    """What Python prints there; fails the test where it fails."""
    return printed(*arguments, first=[checkout], cwd=checkout, timeout=600)


def command(name: str) -> list[str]:
    """The arguments of the tutorial's command of that name, which begins with "python"."""
    program, *arguments = dict(blocks("run"))[name].split()
    assert program == "python"
    return arguments


def test_the_tutorial_writes_one_file_and_one_line_for_each_kernel():
    assert [name for name, _ in blocks("file")] == [
        "kernels/cpu/shifted.py", "kernels/cuda/ladder/four_across.cu", "kernels/cuda/ladder/four_across.py",
    ]  # fmt: skip
    changes = [[line[0] for line in text.splitlines() if line[0] != " "] for _, text in blocks("change")]
    assert changes == [["+"], ["+"], ["-", "+"], ["+"]]  # the import and the line of each


def test_the_tutorial_passes_the_tests_of_the_cpu_kernels(checkout):
    passed = re.search(r"(\d+) passed", run(checkout, *command("cpu-tests")))
    assert passed
    assert int(passed[1]) >= 7


@pytest.mark.exhaustive
def test_the_tutorial_ends_with_rows_of_the_benchmark(checkout):
    pytest.importorskip("mxnet", reason="MXNet is not installed")
    lines = run(checkout, *command("cpu-benchmark"), "--repeats", "2", "--images", "50").splitlines()
    rows = [line.split(" | ") for line in lines]
    for layer in ("2017", "2018sp-2"):
        (row,) = [row for row in rows if row[::2][:2] == [f"| {layer}", "New shifted"]]
        assert float(row[3]) > 0
    assert (checkout / "bench.json").is_file()


def test_auto_takes_neither_kernel_of_the_tutorial_before_it_is_recorded(checkout):
    code = """
from ece408_op.core import dispatch
from ece408_op.problem import COURSE_LAYERS
from ece408_op.runtime.launch import Chip
chip = Chip("NVIDIA H200", (9, 0), 132, 227 * 1024)
for problem in COURSE_LAYERS.values():
    print(dispatch.select(problem).name, dispatch.select(problem, "gpu", chip=chip).name)
print(dispatch.find("shifted").device, dispatch.find("four_across").device)
"""
    *chosen, found = run(checkout, "-c", code).splitlines()
    assert found == "cpu gpu"
    assert len(chosen) == 5
    assert not {"shifted", "four_across"} & set(" ".join(chosen).split())


@needs_nvrtc
def test_the_tutorials_cuda_kernel_compiles(checkout):
    code = """
import sys
sys.path.insert(0, "tests/helpers")
import nvrtc
from cuda_layers import ARCHITECTURES, COURSE, ODD, chip_of
from ece408_op.core import dispatch
kernel = dispatch.find("four_across")
for architecture in ARCHITECTURES[::4]:
    for problem in [COURSE[0], *ODD[:2]]:
        plan = kernel.plan(problem, chip_of(architecture), 4)
        for report in nvrtc.compile_text(kernel.text(plan), architecture).values():
            assert report.spill_bytes == 0, (architecture, problem, report)
print("compiled")
"""
    assert run(checkout, "-c", code) == "compiled\n"


def test_the_test_of_the_tutorials_cuda_kernel_is_skipped_without_a_gpu(checkout):
    found = run(checkout, *command("gpu-tests"))
    try:
        cuda.device_count()
    except DeviceError:
        assert re.search(r"^\d+ skipped", found, re.MULTILINE), found
        assert " passed" not in found
    else:
        assert re.search(r"^\d+ passed", found, re.MULTILINE), found


def test_the_tables_are_those_of_the_results():
    printed(ROOT / "benchmarks/tables.py", "--check")


def test_a_table_that_differs_is_found_and_one_unknown_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the script adds the checkout
    tables = runpy.run_path(str(ROOT / "benchmarks/tables.py"))
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert tables["updated"](text) == text
    wrong = re.sub(r"(`fp16x3_warpgroup` \| )[\d.]+", r"\g<1>98.7", text, count=1)
    assert wrong != text
    assert tables["updated"](wrong) == text
    with pytest.raises(KeyError, match="nothing"):
        tables["updated"]("<!-- table: nothing -->\n<!-- end of table -->")
    used = {name for path in TEXTS for name in re.findall(r"<!-- table: ([\w-]+) -->", path.read_text("utf-8"))}
    assert used == set(tables["TABLES"])


def test_the_readmes_program_runs(capsys):
    pytest.importorskip("mxnet", reason="MXNet is not installed")
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    exec(program, {})
    seconds, replaced = capsys.readouterr().out.splitlines()
    assert float(seconds) > 0
    assert replaced == "{'conv': 'new0'} {}"


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_the_program_of_the_page_on_training_runs(gpu, capsys):
    pytest.importorskip("mxnet", reason="MXNet is not installed")
    if gpu:
        require_gpu()
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^    (net = .*\n)", page, re.MULTILINE)
    program = program.replace("trainer =", line + "trainer =") if gpu else program
    epochs = 3 if gpu else 1
    if not gpu:  # a third of the images
        program = program.replace("range(0, 9000, 100)", "range(0, 3000, 100)")
    exec(program.replace("range(3)", f"range({epochs})"), {})
    replaced, *accuracies = capsys.readouterr().out.splitlines()
    assert ("on_gpu" in program, replaced) == (gpu, "2 convolutions")
    assert len(accuracies) == epochs
    # Of ten classes: real images, or the sample set in their place.
    assert float(accuracies[-1]) > 0.6


def test_the_readmes_accuracies_are_those_of_the_models():
    stated = dict(re.findall(r"^\| `([\w-]+)` \|.* (0\.\d{4}) \|$", README, re.MULTILINE))
    table = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    measured = dict(re.findall(r"^\| ([\w-]+) \| [^|]+ \| real \|.* (0\.\d{4}) \|$", table, re.MULTILINE))
    assert len(stated) == 5
    assert stated == measured


def test_it_is_short():
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in PAGES}
    assert sum(words.values()) <= MOST_WORDS, words


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^  - ([\w-]+\.md)$", text, re.MULTILINE)) == [path.name for path in PAGES]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_text
def test_what_it_names_exists(path):
    """Links; paths, modules and scripts; names in backticks such as `core/check.py`, relative to any folder."""
    text, files = path.read_text(encoding="utf-8"), {name for name, _ in blocks("file")}
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if "://" not in name and not (file.exists() and (not anchor or anchor in anchors(file))):
            wrong.append(target)
    for name in re.findall(r"(?<![\w/.-])(?:ece408_op|kernels|models|data|tests|benchmarks|docs)/[\w./-]*\w", text):
        wrong += [] if name in {*files, "data/", "kernels/"} or (ROOT / name).exists() else [name]
    wrong += [name for name in re.findall(r"python -m (ece408_op\.[\w.]+)", text) if not importlib.util.find_spec(name)]
    scripts = set(re.findall(r"python (\w[\w/]*\.py)", text)) - {"script.py"}
    wrong += [name for name in scripts if not (ROOT / name).is_file()]
    # Files of the user and of the course aside.
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|cuh?))`", text)) - {*files, "script.py", "new.cu"}
    wrong += [name for name in named if not any(f"/{source}".endswith(f"/{name}") for source in SOURCES)]
    assert wrong == []


def test_every_page_that_the_code_cites_exists():
    cited = 0
    for source in SOURCES:
        if source.endswith((".py", ".cu", ".cuh", ".h", ".cpp", ".j2", ".md")):
            for name in re.findall(r"(?<![\w.])docs/[\w/-]+\.md", (ROOT / source).read_text(encoding="utf-8")):
                assert (ROOT / name).is_file(), f"{source}: {name}"
                cited += 1
    assert cited > 0


def test_the_picture_needs_no_network():
    pictures = list(DOCS.glob("*.svg"))
    assert pictures
    for picture in pictures:
        text = picture.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|@import|<script|href=", text), picture.name


def test_the_api_page_names_what_exists_and_every_public_name():
    names = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    pytest.importorskip("mxnet", reason="MXNet is not installed")
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ImportError:
            assert getattr(importlib.import_module(module), attribute).__doc__, name
    assert set(ece408_op.__all__) <= {name.rpartition(".")[2] for name in names}
