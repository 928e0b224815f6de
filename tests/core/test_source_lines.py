"""The line of a mistake is found in the ways in which students write it."""

from pathlib import Path

import pytest

from ece408_op.core.source_lines import line_of
from ece408_op.lab import __path__ as lab_folders

STARTER = Path(lab_folders[0]) / "starters" / "new-forward.h"


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        ("filter_pq", "for (int i = 0; i < KS; ++i)\n  for (int j = 0; j < KS; ++j)\n    a += x[i] * w[j * KS + i];"),
        ("w_channels", "dim3 grid(1);\n\ns[i] = k[((c * M + m) * K + p) * K + q];"),
        ("w_channels", "dim3 grid(1);\n\ns += x4d(b, c, h + p, w + q) * k4d(c, m, p, q);"),
        ("channel_loop", "int c = 0;\n\nfor (int c = 0; c < 1; c++)"),
        ("x_image", "y[0] = 0;\n\ns += x4d(0, c, h + p, w + q) * k4d(m, c, p, q);"),
        ("y_sizes", "const int W_out = W - K + 1;\n\nconst int H_out = H - K;"),
        ("unwritten", "dim3 grid((H + 15) / 16);\n\nif (h >= Ho - 1 || w >= Wo) continue;"),
        ("unwritten", "dim3 grid((W + 15) / 16);\n\nif (h < H - K && w < W - K + 1) y[i] = sum;"),
        ("unwritten_tile", "\n\nconst int gridW = W_out / TW;"),
        ("unwritten_tile", "int a = (W + t - 1) / t, b = W / T + 1;\n\nint gridW = (W_out - 1) / TILE;"),
        ("unwritten_tile", "\n\ndim3 grid(W_out / TILE, H_out / TILE + 1);"),
        ("unwritten_tile", "\n\ndim3 grid(B, M, (W_out + TILE - 1) / TILE * (H_out / TILE));"),
        ("unwritten_tile", "int a = (W + T - 1) / T, b = (W - 1) / T + 1;\na = ceil(W / 8.);\nb = ceil(H / T);"),
        ("unrolled", "int n = C / T;\nfor (int t = 0; t < (C - 1) / T + 1; t++)\nfor (int t = 0; t < C / T; t++)"),
        ("restarted", "float acc = 0.0f;\nfor (int c = 0; c < C; c += 1) {\n acc = 0.0f; acc += x[c] * k[c]; }"),
        ("x_images", "#define x4d(b, c) x[b * C * H + c]\nf(blockIdx.x + 1, y.dptr_ + b * M,\n  x.dptr_ + b * H * W)"),
        ("y_images", "#define y4d(b, m) y[(b) * (M * H) + (m)]\nf(x.dptr_ + b * C * n,\n  y.dptr_ + b * C * n)"),
        ("accumulated", "cudaMemset(a, 0, n * sizeof(float));\n\ncudaMemset(y, 0, n); y[i] += sum;"),
        ("assigned", "float sum = 0;\n\nsum = x4d(b, c, h + p, w + q) * k4d(m, c, p, q);"),
        ("x_strides", "int at = h * W_out + w;\n\nsum += x.dptr_[(h + p) * W_out + w + q] * k4d(m, c, p, q);"),
        ("whole_numbers", "float x;\n\nint sum = 0;\nsum += x[i] * w[j];"),
        ("whole_numbers", "float sum;\n\nint in = x4d(b, c, h, w);\nsum += in * w[j];"),
        ("x_parentheses", "#define N (a * 2 + 1)\n\n#define x4d(b, c, h, w) x[b * C * H * W + c * H * W + h * W + w]"),
        ("activated", "\n\ny4d(b, m, h, w) = sum > 0 ? tanhf(sum) : sum;"),
        ("copied_bytes", "cudaMemcpy(a, b, n *\n  sizeof(int), d);\ncudaMemcpyToSymbol(k, w, M * C * K * K);"),
    ],
    ids=["KS", "channels", "c, m", "a channel", "image 0", "no + 1 in y",
         "last row", "no + 1", "tiles", "- 1 alone", "one of two", "a factor", "no ceil",
         "tiles of a sum", "= 0 in a loop", "x + b", "y + b", "memset", "= for +=", "rows of y", "int sum", "int pixel",
         "macro", "tanh", "bytes"],
)  # fmt: skip
def test_the_line_is_found_in_the_ways_that_students_write(mistake, code):
    assert line_of(mistake, code) == 3


@pytest.mark.parametrize(
    ("mistake", "before", "after", "line"),
    [
        ("filter_pq", "k[m][c][p][q]", "k[m][c][q][p]", 26),
        ("flipped", "k[m][c][p][q]", "k[m][c][K - 1 - p][K - 1 - q]", 26),
        ("row_loop", "int p = 0", "int p = 1", 24),
        ("column_loop", "q < K;", "q < K - 1;", 25),
        ("channel_loop", "c < C;", "c < C - 1;", 23),
        ("unwritten", "w < W_out;", "w < W_out - 1;", 21),
        ("y_rows_columns", "y[b][m][h][w]", "y[b][m][w][h]", 22),
        ("w_channels", "k[m][c][p][q]", "k.dptr_[((c * M + m) * K + p) * K + q]", 26),
        ("overflow", "y[b][m][h][w]", "y.dptr_[(unsigned char)(((b * M + m) * H_out + h) * W_out + w)]", 22),
    ],
)
def test_the_line_is_found_in_the_labs_starter(mistake, before, after, line):
    text = STARTER.read_text(encoding="utf-8")
    assert before in text
    assert line_of(mistake, text.replace(before, after)) == line
