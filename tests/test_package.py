"""The wheel: installed alone and used from another folder."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from process import printed
from submissions import HERE as SUBMISSIONS

import ece408_op

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.exhaustive
FOLDERS = ("ece408_op", "kernels", "models", "data")
#: Fashion-MNIST may be in data/, but is not a part of the package.
IGNORED = shutil.ignore_patterns("__pycache__", "*-ubyte", "*-ubyte.gz")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the package's sources, so that building leaves no files in the checkout."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("not a checkout")
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=IGNORED)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


def pip(command: str, *arguments: object, cwd: Path | None = None) -> None:
    words = ["-m", "pip", "--disable-pip-version-check", command, "--quiet", "--no-deps", *map(str, arguments)]
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def files_of(checkout: Path) -> list[str]:
    """The files of the checkout's folders, by their names in the package."""
    paths = (path for folder in FOLDERS for path in (checkout / folder).rglob("*") if path.is_file())
    names = [path.relative_to(checkout).as_posix() for path in paths]
    return [name if name.startswith("ece408_op/") else f"ece408_op/{name}" for name in names]


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    for module in ("pip", "setuptools"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: a wheel cannot be built here")
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, ".", cwd=checkout)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-index", "--target", folder, wheel)
    return folder


def run(code: str, site: Path, cwd: Path, **variables: str) -> str:
    return printed("-c", code, cwd=cwd, PYTHONPATH=str(site), **variables)


def test_every_file_of_the_folders_is_in_the_wheel_and_nothing_else(checkout, wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(files_of(checkout))


def test_only_the_package_is_installed(site):
    assert sorted(path.name.split("-")[0] for path in site.iterdir()) == ["bin", "ece408_op", "ece408_op"]
    commands = [f"ece408-{name}" for name in ("bench", "grade", "lab", "report")]
    assert sorted(path.name for path in (site / "bin").iterdir()) == commands


def test_an_installed_command_runs(site, tmp_path):
    script = site / "bin" / "ece408-bench"
    code = (
        f"import runpy, sys; sys.argv = ['{script.name}', '--help']; runpy.run_path({str(script)!r}, None, '__main__')"
    )
    assert f"usage: {script.name}" in run(code, site, tmp_path)


def test_the_metadata_has_version_licence_and_extras(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(archive.read(metadata).decode())
    assert fields["Name"] == "ece408-op"
    assert fields["Version"] == ece408_op.__version__
    assert fields["Requires-Python"] == ">=3.9"
    assert fields["License-Expression"] == "MIT"
    extras = "cpu cudnn cu117 cuda12 cuda13 docs profile12 profile13 report test"
    assert set(fields.get_all("Provides-Extra")) == set(extras.split())
    assert any(name.endswith("/LICENSE") for name in archive.namelist())
    needed = {re.split("[<>=;~! ]", need)[0] for need in fields.get_all("Requires-Dist") if "extra ==" not in need}
    assert needed == {"numpy", "llvmlite", "tqdm", "tomli"}


def test_an_installed_wheel_classifies_with_the_operator(site, tmp_path):
    pytest.importorskip("mxnet", reason="MXNet is not installed")
    code = 'import runpy, sys; sys.argv[1:] = ["m2", "ece408-2018sp", "10"]\n'
    code += 'runpy.run_module("ece408_op", None, "__main__")'
    # There are no images and no network, so the sample set of the wheel is used.
    nowhere = {"ECE408_DATA": "", "XDG_CACHE_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    lines = run(code, site, tmp_path, **nowhere).splitlines()  # python -m ece408_op m2, from another folder
    assert lines[0] == "New Inference"
    assert [line.split(":")[0] for line in lines[3:5]] == ["Op Time", "Op Time"]
    assert lines[-1].startswith("Correctness: ")
    assert lines[-1].endswith(" Model: ece408")


def test_an_installed_package_may_be_read_only(site, tmp_path):
    pytest.importorskip("mxnet", reason="MXNet is not installed")
    needed = ["g++", *["setpriv"] * (os.geteuid() == 0)]
    if not all(map(shutil.which, needed)):
        pytest.skip(f"needs {needed}")
    shutil.copytree(site, tmp_path / "site")
    for path in (tmp_path / "site").rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    as_other_users = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "ece408_op", "m2", "1", "--impl", str(SUBMISSIONS / "cpu" / "textbook.h")]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([*as_other_users, *command], env=variables, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_scripts_of_a_checkout_use_its_folders_whatever_is_installed(checkout, site, tmp_path):
    script = checkout / "folders.py"
    script.write_text("from ece408_op import data, errors, kernels, models\n")
    with script.open("a") as file:
        file.write("print(*(module.__file__ for module in (data, errors, kernels, models)), sep='\\n')\n")
    lines = printed(script, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()
    expected = ("data/__init__.py", "ece408_op/errors.py", "kernels/__init__.py", "models/__init__.py")
    assert lines == [str(checkout / name) for name in expected]
