"""The page, which needs nothing beside it, and the same in Markdown, with its figures as files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ece408_op.data.atomic import replacing
from ece408_op.errors import DeviceError
from ece408_op.runtime.install_hint import command

from . import _document, _milestones, _others, _speed
from ._document import Figure, Section, Table
from ._jobs import GPU, Asked, Job
from ._runs import Runs

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
    sections = [_speed.summary(runs, asked), _milestones.machine(runs)]
    if "m1" in asked.milestones:
        sections.append(_milestones.milestone1(runs, asked))
    if "m2" in asked.milestones:
        sections.append(_milestones.milestone2(runs, asked))
    if {"m3", "m4"} & set(asked.milestones):
        sections.append(_speed.milestones34(runs, asked))
    sections.append(_others.published(runs, asked))
    for section in sections:
        _drop_empty(section)
        if not _has_figures(section):
            section.blocks = [_document.Text(_left_out(section, runs))]
    return [*sections, _others.missing(runs)]


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
    """Leave out tables without a row, and sections below that have words alone; one sentence names them."""
    for below in section.sections:
        _drop_empty(below)
    names = [block.caption for block in section.blocks if isinstance(block, Table) and not block.rows]
    names += [below.title for below in section.sections if not _has_figures(below)]
    section.blocks = [block for block in section.blocks if not isinstance(block, Table) or block.rows]
    section.sections = [below for below in section.sections if _has_figures(below)]
    if names:
        quoted = ", ".join(f'"{name}"' for name in names)
        section.blocks.append(_document.Text(f"Left out, because no run here gave a figure for it: {quoted}."))


def _left_out(section: Section, runs: Runs) -> str:
    """The sentence that stands for a section in which nothing was measured: which part, and why."""
    facts = runs.machine
    gpu_problem = facts["cannot"].get(GPU) if facts is not None else None
    if section.title.startswith("Milestones 3") and gpu_problem:
        # The advice on what to use instead is in the machine's table and at the report's end.
        return f"Milestones 3 and 4 were left out: {gpu_problem.split(': use ')[0].rstrip('.')}."
    if section.title.startswith("Published"):
        return (
            "The published figures were left out: none of them has a network and a number of images that were run here."
        )
    name = "The summary" if section.title == "In short" else section.title.split(":")[0]
    return f"{name} {'were' if name.startswith('Milestones') else 'was'} left out: no run gave a figure for it."


def _has_figures(section: Section) -> bool:
    """Whether a section, or one below it, has more than paragraphs."""
    return any(not isinstance(block, _document.Text) for block in section.blocks) or bool(section.sections)


def cell(words: Any) -> str:
    """A cell of a Markdown table."""
    return str(words).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _write(path: Path, words: str) -> None:
    with replacing(path) as file:
        file.write(words.encode())
