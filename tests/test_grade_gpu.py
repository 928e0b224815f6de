"""On a GPU: every fixture for it, each with the verdict written in its first line; the GPU is well afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ece408_op import cuda
from ece408_op.errors import DeviceError
from ece408_op.grade import cli

FILES = sorted(Path(__file__).with_name("submissions").glob("gpu/*.cuh"))
#: 10,000 images: what one fixture is tied to.
SPEC = """
networks = ["2017", "2018fa"]
runs = 5
probe = []
[limits]
run_seconds = 5
"""
#: Fixtures that one network alone is for.
TIED = {"tied_to_10000": "2017", "constant_2018fa": "2018fa"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvcc") is None or shutil.which("g++") is None, reason="needs nvcc and g++"),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    try:
        cuda.chip()
    except DeviceError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("grade")
    found = {}
    for name, spec in {"all": SPEC, **{stem: f'networks = ["{net}"]\n' for stem, net in TIED.items()}}.items():
        (folder / "spec.toml").write_text(spec)
        paths = [path for path in FILES if (path.stem if path.stem in TIED else "all") == name]
        where = [*map(str, paths), "--context", "gpu", "--spec", str(folder / "spec.toml")]
        cli.main([*where, "--json", str(folder / "out.json")])
        data = json.loads((folder / "out.json").read_text())
        found.update({record["path"]: record for record in data["records"]})
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_verdict(path: Path, records: dict[str, dict[str, Any]]) -> None:
    record = records[str(path)]
    expected = path.read_text().splitlines()[0].removeprefix("// expected: ")
    assert record["status"] == expected, record["reason"]
    assert record["precision"] == {"passed": "half" if path.stem == "half" else "float32"}.get(expected)


def test_the_gpu_is_well_afterwards(records: dict[str, dict[str, Any]]) -> None:
    assert records
    cupy = cuda.cupy()
    assert int(cupy.arange(1000).sum()) == 499500


def test_times_are_of_the_order_that_the_worker_has(records: dict[str, dict[str, Any]]) -> None:
    path = next(str(path) for path in FILES if path.stem == "naive")
    for layer in records[path]["networks"][0]["layers"]:
        for run in layer["runs"]:
            assert run["seconds"] > 0.5 * run["worker_seconds"]
