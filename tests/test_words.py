"""The code and the documentation use the field's terms, and private words of the past do not come back."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Private words as regular expressions, and what to write instead. In identifiers "_" separates words.
PRIVATE = {
    "parted": "promoted",
    "anew": "again",
    "(held|holds?)( it| them)? against": "compared with, checked against",
    "jail": "sandbox",
    "keeper": "supervisor, shims",
    "thermometer": "reference workload",
    "bur(y|ied|ies)|hopeless": "the plain verb",
    "dearer": "predicted to be slower",
    "doors?": "public API, entry point",
    "lent": "reused, in use",
    "settle[ds]?": "reorder to the default layout",
    "suits": "is recommended",
    "so many": "n, that number of",
    "fused gemm": "implicit GEMM",
    "second level cache": "L2 cache",
    "streamed stores?": "non-temporal stores",
    "floors?": "roofline, layer",
    "made good": "corrected",
    "(was|were) tried": "the present state; Git has the history",
}
#: Words that are private in the split-precision kernels and their tests alone.
PRIVATE_IN_SPLIT_PRECISION = {
    "gates?": "mbarrier, full and empty barriers",
    "teams?": "consumer warpgroup",
    "loaders?": "producer warp",
    "cut off": "truncated",
}
#: Other senses: the functions of NumPy and C.
ALLOWED = r"(np|math)\.floor\b|\bfloorf?\("
FOLDERS = ("ece408_op", "kernels", "models", "data", "tests", "benchmarks", "docs")
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".md", ".j2", ".toml", ".yml", ".sh"}


def own_files() -> list[Path]:
    """The files that this project's authors wrote: all but submissions, old libraries' headers and this test."""
    found = [*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    others = {"submissions", "headers", Path(__file__).name}
    return [path for path in found if path.suffix in SUFFIXES and not others & set(path.parts)]


def test_no_private_word_is_used():
    uses = []
    for path in own_files():
        name = path.relative_to(ROOT).as_posix()
        split_precision = name.startswith(("kernels/cuda/split_precision", "tests/emulator", "tests/kernels"))
        words = {**PRIVATE, **(PRIVATE_IN_SPLIT_PRECISION if split_precision else {})}
        pattern = re.compile(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", re.IGNORECASE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            text = re.sub(r"[_-]", " ", re.sub(ALLOWED, "", line))
            uses += [f"{name}:{number}: {found[0]}" for found in pattern.finditer(text)]
    advice = [f"  {word}: {term}" for word, term in {**PRIVATE, **PRIVATE_IN_SPLIT_PRECISION}.items()]
    assert uses == [], "\n".join([*uses, "write instead:", *advice])
