"""The course's larger images: scikit-image's bilinear resize, to the bit, without scikit-image.

For an image of uint8 this gives what scikit-image from 0.19 on gives as

    (resize(image / 256, (S, S), mode="constant", cval=0, anti_aliasing=False) * 256).astype(uint8)

Output pixel i of S stands at c = (i + 0.5) * (H / S) - 0.5 on the input's axis of H pixels, between
the pixels floor(c) and floor(c) + 1, which weigh 1 - f and f with f = c - floor(c); beyond the image
lies zero. In two dimensions a pixel is a sum of four terms,

    v00 * wy0 * wx0 + v01 * wy0 * wx1 + v10 * wy1 * wx0 + v11 * wy1 * wx1

in float64. The bits depend on that order of products and sums, which is the order of
scipy.ndimage.zoom. Dividing by 256 and multiplying again changes no bit, so neither is done.
The result is clipped to the range of each image: beside the zeros outside, an image without a zero
of its own does not fade.
"""

from __future__ import annotations

import numpy as np

#: Output pixels worked on at once: 4 MB of float64, which stays in a core's cache.
_CHUNK_PIXELS = 2**19


def _axis(old: int, new: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """For each of ``new`` pixels its two neighbours, as indices into the axis padded by one, and their weights."""
    centre = (np.arange(new) + 0.5) * (old / new) - 0.5
    first = np.floor(centre)
    weight = centre - first
    index = first.astype(np.intp) + 1
    return (index, 1.0 - weight), (index + 1, weight)


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Images (N, H, W), uint8, as (N, size, size), uint8; bilinear, zero outside, no anti-aliasing."""
    count, height, width = images.shape
    rows, columns = _axis(height, size), _axis(width, size)
    out = np.empty((count, size, size), np.uint8)
    step = max(1, _CHUNK_PIXELS // (size * size))
    for start in range(0, count, step):
        part = images[start : start + step]
        # Images last: taking a row or a column is then a copy of whole runs of memory.
        padded = np.zeros((height + 2, width + 2, len(part)))  # (H + 2, W + 2, n)
        padded[1:-1, 1:-1] = part.transpose(1, 2, 0)
        total = np.zeros((size, size, len(part)))
        for row, row_weight in rows:
            band = padded[row]  # (size, W + 2, n)
            band *= row_weight[:, None, None]
            for column, column_weight in columns:
                term = band[:, column]  # (size, size, n)
                term *= column_weight[:, None]
                total += term
        pixels = total.astype(np.uint8)
        np.clip(pixels, part.min(axis=(1, 2)), part.max(axis=(1, 2)), out=pixels)
        out[start : start + step] = pixels.transpose(2, 0, 1)
    return out
