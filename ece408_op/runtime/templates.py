"""Pages of HTML from Jinja's templates, with untrusted text such as a submission's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ece408_op.errors import DeviceError

from .install_hint import command


def render(template: Path, shown: Mapping[str, Any], **filters: Callable[..., Any]) -> str:
    """Return the page that Jinja makes of a template and of what is shown, with filters by name."""
    own = environment(template.parent)
    own.filters.update(filters)
    return str(own.get_template(template.name).render(shown))


@cache
def environment(folder: Path) -> Any:
    """Return Jinja's environment for the templates in the folder, which extend page.html.j2 of this one.

    It escapes all text, and a name that a template does not get is an error. Raises DeviceError without Jinja2.
    """
    module = jinja2()
    return module.Environment(
        loader=module.FileSystemLoader((folder, Path(__file__).parent)),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=module.StrictUndefined,
    )


def jinja2() -> Any:
    """Return the module Jinja2; raises DeviceError, with what to install, without it."""
    try:
        return import_module("jinja2")
    except ImportError as error:
        raise DeviceError(f"expected Jinja2 for pages, got {error}; {command('report')}") from None
