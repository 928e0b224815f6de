"""Bilinear resizing for the course's larger images: bit for bit that of scikit-image, without scikit-image.

For uint8 images the result is that of scikit-image 0.19 and later for

    (resize(image / 256, (S, S), mode="constant", cval=0, anti_aliasing=False) * 256).astype(uint8)

On the input's axis of H pixels, output pixel i of S has the coordinate c = (i + 0.5) * (H / S) - 0.5. Its neighbours
are the pixels floor(c) and floor(c) + 1 with the weights 1 - f and f, where f = c - floor(c); pixels outside the image
are zero. In two dimensions an output pixel is a sum of four terms in float64,

    v00 * wy0 * wx0 + v01 * wy0 * wx1 + v10 * wy1 * wx0 + v11 * wy1 * wx1

The bits depend on this order of products and sums, which is that of scipy.ndimage.zoom. Dividing by 256 and multiplying
by it change no bit, so both are left out. The result is clipped to the range of each image, as scikit-image does: an
image without a zero pixel does not fade at its edges.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

#: Output pixels per step: 4 MB of float64, which fit a core's cache.
_CHUNK_PIXELS = 2**19


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Return uint8 images (N, H, W) resized to (N, size, size), uint8: bilinear, zero outside, no anti-aliasing.

    Threads on all cores resize some images each.
    """
    count, height, width = images.shape
    rows, columns = _neighbours(height, size), _neighbours(width, size)
    out = np.empty((count, size, size), np.uint8)
    step = max(1, _CHUNK_PIXELS // (size * size))

    def resize_chunk(start: int) -> None:
        chunk = images[start : start + step]
        # The image index comes last: selecting a row or a column then copies contiguous memory.
        padded = np.zeros((height + 2, width + 2, len(chunk)))  # (H + 2, W + 2, n)
        padded[1:-1, 1:-1] = chunk.transpose(1, 2, 0)
        total = np.zeros((size, size, len(chunk)))
        for row, row_weight in rows:
            band = padded[row]  # (size, W + 2, n)
            band *= row_weight[:, None, None]
            for column, column_weight in columns:
                term = band[:, column]  # (size, size, n)
                term *= column_weight[:, None]
                total += term
        pixels = total.astype(np.uint8)
        np.clip(pixels, chunk.min(axis=(1, 2)), chunk.max(axis=(1, 2)), out=pixels)
        out[start : start + step] = pixels.transpose(2, 0, 1)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(resize_chunk, range(0, count, step)))  # the list raises what a thread raised
    return out


def _neighbours(old: int, new: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, per neighbour, the indices into the axis padded by one, and the weights, both of shape (new,)."""
    centre = (np.arange(new) + 0.5) * (old / new) - 0.5
    first = np.floor(centre)
    weight = centre - first
    index = first.astype(np.intp) + 1
    return [(index, 1.0 - weight), (index + 1, weight)]
