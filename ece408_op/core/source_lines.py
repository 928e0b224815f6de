"""The line of a C++ or CUDA source that makes a mistake of ``_hypotheses``, by the shape of its expressions."""

from __future__ import annotations

import re

from ece408_op.runtime.source_text import without_comments

_LOOP = re.compile(
    r"\bfor\s*\(\s*(?:const\s+)?(?:unsigned\s+|size_t\s+|int\s+|auto\s+)*(\w+)\s*=[^;]{0,99};[^;]{0,99}?<=?\s*([^;]{1,99});"
)
#: Names of the bounds of loops over a filter, and the names of rows and columns without such loops.
_KERNEL = re.compile(r"\b(K[SWHXY]?|KERNEL\w*|MASK\w*|FILTER\w*|k_?size|shape_\[3\]|[3-9])( *- *1)?", re.IGNORECASE)
#: A number of tiles that is right: ``ceil(n / 16.0)``, ``(n + TILE - 1) / TILE``, ``(n + 15) / 16`` or
#: ``(n - 1) / TILE + 1``.
_ROUNDED_UP = re.compile(
    r"\bceilf? *\([^;\n]*(\d\.|\.\d|float|double)[^;\n]*"
    r"|\+ *((?!1\b)\w+ *- *1|[2-9]|\d\d+|[A-Z]\w*) *\)* */ *\(?\w+|/ *\(?\w+ *\)* *\+ *1\b"
)
#: Characters of a source and of a line that are searched: some expressions take time in the square of a line's length.
_SEARCHED, _WIDEST = 1 << 18, 240


def line_of(mistake: str, source: str) -> int | None:
    """Return the line of a source, counted from 1, that seems to make the mistake of that name; None without one."""
    code = "\n".join(line[:_WIDEST] for line in without_comments(source[:_SEARCHED]).split("\n"))
    p, q = _filter_loops(code)
    lines = code.split("\n")
    for pattern in _patterns(mistake, re.escape(p), re.escape(q), code):
        for found in re.finditer(pattern, code, re.MULTILINE):
            line = code.count("\n", 0, found.start()) + 1
            rest, rounded = _ROUNDED_UP.subn("", lines[line - 1])
            if not (mistake.startswith("unwritten") and rounded and "/" not in rest):
                return line
    return None


def _filter_loops(code: str) -> tuple[str, str]:
    """Return the names of the loops over a filter's rows and columns: the first two that end at K."""
    names = [variable for variable, bound in _LOOP.findall(code) if _KERNEL.fullmatch(bound.strip())]
    first = names[0] if names else "p"
    return first, next((name for name in names if name != first), "q")


def _patterns(name: str, p: str, q: str, code: str) -> list[str]:
    """Return the regular expressions to try, the best first."""
    adds = re.search(r"\+=(?=[^;\n]*\*)", code) or re.search(r"\+=", code)  # a product, if any
    before = code[: adds.start()] if adds else ""
    product = re.search(r"\w[\w.\[\]() ,+*-]*$", before[-_WIDEST:].rstrip())
    total = re.escape(re.split(r"[\[(]", product[0])[0].strip()) if product else "sum"
    tiles = [r"^[^;\n]*\bdim3\b[^;\n]*/", r"=[^;=\n]*/ *(TILE\w*|BLOCK\w*|T[A-Z]?)\b", r"= *\w+ *- *K\w* *[,;)]"]
    written = r"\by\w*[\[(][^;=\n]*[+-]?="
    return {
        "filter_pq": [rf"\[ *{q} *\] *\[ *{p} *\]", rf", *{q} *, *{p} *\)", rf"\b{q} *\)? *\* *\w+ *\+ *{p}\b"],
        "flipped": [rf"- *(1 *- *)?{index}\b" for index in (p, q)],
        "x_rows_columns": [rf"\w *\+ *{q}\b[^;\n]*\w *\+ *{p}\b", rf"{q} *\+ *\w[^;\n]*{p} *\+ *\w"],
        "y_rows_columns": [r"\by\w*\W[^;=\n]*\bw\w*\W+h\w*\W[^;=\n]*=", written],
        "y_filter": [written],
        "w_strides": [r"#define +[kw]\w*\([^\n]*", r"(?<![.\w])[kw]\w*(\.\w+)?(\[| *\+)[^;\n]*"],
        "y_strides": [r"\by\w*[\[(][^;=\n]*\b[HW]\b[^;=\n]*=", r"#define +y\w*\([^\n]*"],
        "y_images": [
            r"(?<![.\w])y\w*(\.\w+)? *\+(?![^,;\n]*\bM\b)[^,;\n]*",
            r"#define +y\w*\((?![^\n]*\* *\(?M\b)[^\n]*",
        ],
        "x_images": [
            r"(?<![.\w])x\w*(\.\w+)? *\+(?![^,;\n]*\bC\b)[^,;\n]*",
            r"#define +x\w*\((?![^\n]*\* *\(?C\b)[^\n]*",
        ],
        "x_image": [r"(?<![.\w])x\w*[\[(] *0 *[],]"],
        "y_sizes": tiles[2:],
        "loops_to_w": [r"[<>]=? *(W|width|WIDTH)\b", r"[<>]=? *(H|height|HEIGHT)\b"],
        "w_channels": [r"\bc\w* *\* *[MC]\w* *\+ *m\w*\b", r"[\[(] *c\w* *(\] *\[|,) *m\w* *[],]"],
        "channel_loop": [r"\bc *= *1\b", r"\bc *< *(\w+ *- *)?1\b"],
        "row_loop": [rf"\b{p} *= *1\b", rf"\b{p} *< *\w+ *- *1\b"],
        "column_loop": [rf"\b{q} *= *1\b", rf"\b{q} *< *\w+ *- *1\b"],
        "activated": [r"\b(fmaxf?|max|tanhf?)\s*\("],
        "x_parentheses": [r"#define[^\n]*\w *\* *\w[^\n]*\+ *\w+ *\* *[A-Z]\w*\b", rf"\w *\+ *{p} *\* *\w+"],
        "halo": [r"__shared__[^;\n]*"],
        "sum": [rf"\b(float|double|auto|half|__half)\s+{total}\b"],
        "restarted": [rf"(?<!\w )\b{total} *= *[0.]+f? *;", r"\batomicExch\b", written],
        "unrolled": [r"< *\w+ */ *(TILE\w*|BLOCK\w*|T[A-Z]?|\d+) *;"],
        "assigned": [r"\w *= *[^;=\n]*\bx\w*(\.\w+)?[\[(][^;=\n]*\*"],
        "whole_numbers": [rf"\bint +{total}\b", r"\bint +\w+ *= *\w*[xk]\w*[\[(]"],
        "centred": [r"- *\(? *\w*(K|MASK|RADIUS)\w* */ *2", r"- *\w*RADIUS\w*"],
        "x_strides": [
            r"\bx\w*(\.\w+)?[\[(][^;=\n]*(\bW_?[oO]ut\b|\bOW\b|\b(out|output)_?(w|width)\b|\bW *- *K)",
            r"#define +x\w*\([^\n]*",
        ],
        "accumulated": [r"cudaMemset\w*(?![^;]{0,999}sizeof)[^;]{0,999};", r"\by\w*[\[(][^;=\n]*\+=", r"atomicAdd"],
        "copied_bytes": [r"cudaMemcpy(?![^;]{0,999}sizeof)[^;]{0,999};"],
        "overflow": [r"\b(unsigned +)?(short|char)\b", r"\bu?int(8|16)_t\b"],
        "rounded": [r"\b(__half2?|half2?|_Float16|__nv_bfloat16|wmma)\b"],
        "unwritten": [r"\b\w+ *(<|>=) *\w+ *- *(1|K\w*)\b(?! *\+)", r"\bfor *\([^;\n]*= *1 *;", *tiles],
        "unwritten_tile": tiles,
    }.get(name, [])
