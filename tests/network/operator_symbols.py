"""Symbols of operators that move or resample values and of mx.np's names, for the tests of outputs and gradients."""

from __future__ import annotations

from network_case import mx

S, N, X = mx.sym, mx.sym.np, mx.sym.npx
data = S.Variable("data")


def moved(sizes, random):
    """Return symbols that move values: expand_dims, squeeze, SwapAxis, slice_axis, SliceChannel, UpSampling."""
    axis = random.randrange(len(sizes))
    below, between = axis - len(sizes), random.randint(-len(sizes) - 1, len(sizes))
    begin = random.randrange(sizes[axis])
    end = random.choice([None, random.randint(begin + 1, sizes[axis]), begin - sizes[axis] + 1 or None])
    longer = S.expand_dims(data * 2, axis=between)
    thrice = S.split(S.concat(data, data * 2, S.square(data), dim=axis), num_outputs=3, axis=below)
    found = [longer, S.squeeze(longer, axis=between), S.swapaxes(data, axis, random.randrange(len(sizes)))]
    found += [S.squeeze(longer)] if len(sizes) > 1 or sizes[0] > 1 else []
    found += [S.slice_axis(data, axis=random.choice([axis, below]), begin=begin, end=end), thrice[2] * thrice[0]]
    found += [S.UpSampling(data, scale=random.randint(1, 3), sample_type="nearest")] if len(sizes) == 4 else []
    return found


def resampled(size, kind):
    """Return a symbol of AdaptiveAvgPooling2D, or of BilinearResize2D with aligned corners or without."""
    if kind == "mean":
        return S.contrib.AdaptiveAvgPooling2D(data, output_size=size[:1] if size[0] == size[1] else size)
    return S.contrib.BilinearResize2D(data, height=size[0], width=size[1], align_corners=kind == "corners")


def deconvolution(image, filters, groups, bias, adj, target, sizes):
    """Return a Deconvolution of images of some rows and columns, None if it has no output.

    adj: at most, since MXNet takes less than the stride. target: give ``target_shape``. MXNet with oneDNN computes that
    only with the ``pad`` that follows from it, so ``adj`` is at most 1 then, and 0 without a ``pad``.
    """
    most = [min(s - 1, p, 1) if target else s - 1 for s, p in zip(sizes["stride"], sizes["pad"])]
    adj = [min(each, limit) for each, limit in zip(adj, most)]
    axes = zip(image, sizes["kernel"], sizes["stride"], sizes["pad"], sizes["dilate"], adj)
    output = [(n - 1) * stride + dilate * (k - 1) + 1 - 2 * pad + added for n, k, stride, pad, dilate, added in axes]
    if min(output) < 1:
        return None
    words = {
        "adj": adj,
        **sizes,
        "num_group": groups,
        "no_bias": not bias,
        **({"target_shape": output} if target else {}),
    }
    return S.Deconvolution(data, num_filter=filters * groups, **words)


#: Kinds of ``resampled``.
KINDS = ("mean", "corners", "centers")


#: Operators of mx.np, for positive x (B, C, H).
NUMPY = {
    "arithmetic": lambda x: x + N.square(x) * 0.5 - x / (x + 2) + x ** N.sqrt(x),
    "with numbers": lambda x: (1.5 - (x + 2) * 0.25 - 1) / 3 + 2 / x + x**1.5 + 1.5**x,
    "functions": lambda x: N.abs(N.negative(x)) + N.tanh(N.exp(x)) + N.log(x) + X.relu(x - 1) * X.sigmoid(x),
    "joins": lambda x: N.concatenate([x, x * 2], axis=-1) + N.concatenate([x, x], axis=2),
    "shapes": lambda x: N.squeeze(N.expand_dims(N.transpose(x, (0, 2, 1)), 1), 1).reshape((4, -1)),
    "means": lambda x: N.mean(x, axis=1, keepdims=True) * x - x.mean(axis=(0, 2), keepdims=True),
    "sums": lambda x: N.sum(x, axis=1) + N.max(x, axis=1) - N.min(x, axis=1) + N.transpose(x).sum(axis=(1,)).T,
}
