"""What to install is said by a command that works for the way in which the package itself was installed."""

import json
from types import SimpleNamespace

import pytest

from ece408_op.runtime import install_hint


def test_in_a_checkout(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    assert install_hint.command("cpu", tmp_path) == f"pip install -e '{tmp_path}[cpu]'"
    monkeypatch.chdir(tmp_path)
    assert install_hint.command("cuda13", tmp_path) == "pip install -e '.[cuda13]'"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"url": "file:///d/e-0.1.whl"}, "pip install 'ece408-op[cpu] @ file:///d/e-0.1.whl'"),
        ({"url": "https://a.example/e.whl"}, "pip install 'ece408-op[cpu] @ https://a.example/e.whl'"),
        ({"url": "file:///a%20folder/checkout"}, "pip install '/a folder/checkout[cpu]'"),
        (
            {"url": "https://a.example/e.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "pip install 'ece408-op[cpu] @ git+https://a.example/e.git@12ab'",
        ),
        (None, "pip install 'ece408-op[cpu] @ file:///PATH' with the path of this package's wheel or checkout"),
    ],
)
def test_of_an_installed_package(record, expected, tmp_path, monkeypatch):
    files = {"direct_url.json": json.dumps(record) if record else None}
    monkeypatch.setattr(install_hint, "distribution", lambda name: SimpleNamespace(read_text=files.__getitem__))
    assert install_hint.command("cpu", tmp_path) == expected
