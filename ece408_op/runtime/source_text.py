"""The text of untrusted C++ and CUDA files: comments, literals, and headers that a machine may lack."""

from __future__ import annotations

import re

#: Comments and literals. Each alternative matches wherever it begins, so that no text takes more than linear time.
_TOKENS = re.compile(r"""//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?""", re.DOTALL)
_NUMBER_SEPARATOR = re.compile(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])")
#: A line that includes a header: what is in front of its name; the name in quotes; the name in angle brackets.
INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)(?:"([^"\r\n]+)"|<([^>\r\n]+)>)', re.MULTILINE)
#: A pattern of headers of MXNet's tree, where the course's file lay, and of CUDA's toolkit and samples, which files for
#: the CPU include too. Most submissions use nothing of them.
COURSE_HEADERS = (
    r"(\./)?((mxnet|nnvm|dmlc|mshadow|tvm)/|(\.\./)+|(cuda|device)(_\w+)?\.h(pp)?$|(math|host|sm|vector)_\w+\.h(pp)?$"
    r"|(helper|surface|texture)_\w+\.h$|cu(blas|dnn|fft|rand|rand_kernel|solverDn|sparse)\.h$|(cblas|mkl|npp)\.h$"
    r"|(mxnet|mshadow|elemwise)_op(_common)?\.h$|(operator_common|new-inl)\.h$)"
)


def without_comments(code: str) -> str:
    """Return text of the same length with spaces for comments; newlines stay."""
    return _TOKENS.sub(lambda found: _blank(found[0]) if found[0].startswith("/") else found[0], code)


def mask(code: str) -> str:
    """Return text of the same length with spaces for comments and literals; newlines stay."""
    return _TOKENS.sub(lambda found: _blank(found[0]), _NUMBER_SEPARATOR.sub(" ", code))


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)
