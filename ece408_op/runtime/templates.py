"""Pages of HTML from Jinja's templates, with text that nobody has checked, such as a submission's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def environment(*folders: Path) -> Any:
    """Return Jinja's environment for the templates in these folders; those of tools extend page.html.j2 of this one.

    It escapes all text, and a name that a template does not get is an error. Raises ImportError without Jinja2.
    """
    jinja2 = import_module("jinja2")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader((*folders, Path(__file__).parent)),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


__all__ = ("environment",)
