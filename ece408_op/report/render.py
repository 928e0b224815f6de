"""The page, which needs nothing beside it, and the same in Markdown, with its figures as files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ece408_op.data.atomic import replacing
from ece408_op.errors import DeviceError
from ece408_op.install_hint import command

from . import document, milestones, others, speed
from .document import Figure, Section, Table
from .jobs import Asked, Job
from .runs import Runs

PAGE, MARKDOWN, FIGURES = "index.html", "report.md", "figures"
TITLE = "ECE408 convolution: the milestones on this machine"

#: For a figure that stands alone in a file: the ink that a page would give it.
_ALONE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def check() -> None:
    """Raise DeviceError, with what to install, where the page could not be written."""
    for name in ("jinja2", "matplotlib"):
        try:
            import_module(name)
        except ImportError as error:
            raise DeviceError(f"expected {name} to import, got {error}; {command('report')}") from None


def contents(plan: Sequence[Job], asked: Asked, runs_folder: Path) -> list[Section]:
    """The report's sections, from the kept runs of a plan."""
    runs = Runs(plan, runs_folder)
    sections = [speed.summary(runs, asked), milestones.machine(runs)]
    if "m1" in asked.milestones:
        sections.append(milestones.milestone1(runs, asked))
    if "m2" in asked.milestones:
        sections.append(milestones.milestone2(runs, asked))
    if {"m3", "m4"} & set(asked.milestones):
        sections.append(speed.milestones34(runs, asked))
    sections += [others.published(runs, asked), others.missing(runs)]
    facts = runs.machine
    why = f": {facts['cannot']['gpu']}" if facts is not None and facts["cannot"].get("gpu") else "; see the end"
    for section in sections:
        _drop_empty(section)
        if section.title.startswith("Milestones 3") and not _has_figures(section):
            section.blocks = [document.Text(f"Left out, because nothing was measured on a GPU{why}.")]
    return sections


def write(plan: Sequence[Job], asked: Asked, runs_folder: Path, out: Path) -> list[Path]:
    """Write page and Markdown into a folder; their paths. Raises DeviceError, OSError and what reading runs does."""
    check()
    sections = contents(plan, asked, runs_folder)
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    for figure in figures(sections):
        head, rest = figure.svg.split(">", 1)
        _write(out / FIGURES / f"{figure.name}.svg", f"{head}>{_ALONE}{rest}")
    for name, template in ((PAGE, "page.html.j2"), (MARKDOWN, "report.md.j2")):
        _write(out / name, page(sections, template))
    return [out / PAGE, out / MARKDOWN]


def page(sections: Sequence[Section], template: str) -> str:
    """The sections through a template of this folder; in HTML all text is escaped."""
    jinja2 = import_module("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(kind=lambda block: type(block).__name__, cell=cell)
    # The figures are this program's own SVG; names in them come from the list of kernels.
    environment.filters["svg"] = import_module("markupsafe").Markup
    return str(environment.get_template(template).render(title=TITLE, sections=sections, figures=FIGURES))


def figures(sections: Sequence[Section]) -> list[Figure]:
    """All figures of the sections."""
    found: list[Figure] = []
    for section in sections:
        found += [block for block in section.blocks if isinstance(block, Figure)]
        found += figures(section.sections)
    return found


def _drop_empty(section: Section) -> None:
    """Leave out tables without a row, and sections with words alone: what is missing is listed at the end."""
    section.blocks = [block for block in section.blocks if not isinstance(block, Table) or block.rows]
    for below in section.sections:
        _drop_empty(below)
    section.sections = [below for below in section.sections if _has_figures(below)]
    if not section.blocks and not section.sections:
        section.blocks.append(document.Text("No run gave a figure for this; see the end."))


def _has_figures(section: Section) -> bool:
    """Whether a section, or one below it, has more than paragraphs."""
    return any(not isinstance(block, document.Text) for block in section.blocks) or bool(section.sections)


def cell(words: Any) -> str:
    """A cell of a Markdown table."""
    return str(words).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _write(path: Path, words: str) -> None:
    with replacing(path) as file:
        file.write(words.encode())
