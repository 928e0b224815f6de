"""What to install is said by a command that works for the way in which the package itself was installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ece408_op.runtime import install_hint


class Distribution:
    def __init__(self, url: str | None, **more: object) -> None:
        self.text = None if url is None else json.dumps({"url": url, **more})

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.text


def test_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    assert install_hint.command("cpu", tmp_path) == f"pip install -e '{tmp_path}[cpu]'"
    monkeypatch.chdir(tmp_path)
    assert install_hint.command("cuda13", tmp_path) == "pip install -e '.[cuda13]'"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///d/e-0.1-py3-none-any.whl", "pip install 'ece408-op[cpu] @ file:///d/e-0.1-py3-none-any.whl'"),
        ("https://a.example/e.whl", "pip install 'ece408-op[cpu] @ https://a.example/e.whl'"),
        ("file:///a%20folder/checkout", "pip install '/a folder/checkout[cpu]'"),
        (None, "pip install 'ece408-op[cpu] @ file:///PATH' with the path of this package's wheel or checkout"),
    ],
)
def test_of_an_installed_package(
    url: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_hint, "distribution", lambda name: Distribution(url))
    assert install_hint.command("cpu", tmp_path) == expected


def test_of_a_package_installed_from_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Distribution("https://a.example/e.git", vcs_info={"vcs": "git", "commit_id": "12ab"})
    monkeypatch.setattr(install_hint, "distribution", lambda name: record)
    expected = "pip install 'ece408-op[cpu] @ git+https://a.example/e.git@12ab'"
    assert install_hint.command("cpu", tmp_path) == expected
