"""The pip command that installs an extra of this package, by how the package itself was installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

_ROOT = Path(__file__).resolve().parents[2]


def command(extra: str, root: Path = _ROOT) -> str:
    """The command that installs that extra: from the checkout, or from the wheel, folder or repository pip was given.

    root: the folder that holds the package's. pip records its source in direct_url.json (PEP 610).
    """
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{_here(root)}[{extra}]'"
    url = _source()
    if url is None:
        return f"pip install 'ece408-op[{extra}] @ file:///PATH' with the path of this package's wheel or checkout"
    if url.startswith("file:") and not url.endswith(".whl"):
        return f"pip install '{unquote(urlsplit(url).path)}[{extra}]'"
    return f"pip install 'ece408-op[{extra}] @ {url}'"


def _here(root: Path) -> str:
    try:
        return "." if Path.cwd() == root else str(root)
    except FileNotFoundError:  # the current folder was removed
        return str(root)


def _source() -> str | None:
    """The URL that pip installed this package from, as pip takes it; None where pip recorded none."""
    try:
        text = distribution("ece408-op").read_text("direct_url.json")
        if not text:
            return None
        record = json.loads(text)
        url = str(record["url"])
        control = record.get("vcs_info")
        return url if control is None else f"{control['vcs']}+{url}@{control['commit_id']}"
    except (PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
