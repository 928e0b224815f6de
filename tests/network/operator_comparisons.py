"""What the tests of operators share: comparisons of outputs and gradients with MXNet's, and random attributes."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from network_case import S, computing, data, mxnets, ours, values
from training_case import compare

from ece408_op.core.kernel import EPS32

#: The operators that tests cover.
tested = set()
#: Errors of a function of one element, in units in the last place: CUDA's functions err by at most 4, for tanhf (CUDA
#: C++ Programming Guide, mathematical functions); oneDNN's approximate tanh and logistic err by more, mostly near zero,
#: where they are exact to some units in the last place of one.
FUNCTION = 32


def check(symbol, shapes, way, terms=1, training_terms=None, low=None, **words):
    """Compare the outputs of inference, and a step of training but with cuDNN; see the functions below."""
    check_outputs(symbol, shapes, way, terms, low)
    if way != "cudnn":
        check_gradients(symbol, shapes, way, training_terms or terms, low, **words)


def random_values(symbol, shapes, low=None, **args):
    """Return data and parameters, at least ``low`` where it is given, others as given, and states."""
    random, aux = values(symbol, shapes, 0)
    args = {**random, **args}
    return args if low is None else {n: np.abs(a) + np.float32(low) for n, a in args.items()}, aux


def check_outputs(symbol, shapes, way, terms=1, low=None):
    """Compare; ``terms``: terms of each sum, for the error of a float32 sum in any order. ``shapes``: of the data."""
    args, aux = random_values(symbol, shapes, low)
    got, expected = ours(symbol, args, aux, tuple(shapes), way), mxnets(symbol, args, aux)
    assert len(got) == len(expected)
    for ours_, theirs in zip(got, expected):
        assert ours_.shape == theirs.shape
        largest = np.abs(theirs).max(initial=1)
        bound = 2 * (terms + FUNCTION) * EPS32 * largest * (1 if terms == 1 else np.sqrt(terms))
        assert np.abs(ours_ - theirs).max(initial=0) <= bound


def check_gradients(symbol, shapes, way, terms=1, low=None, is_loss=False, args=None):
    """Compare a step of training with MXNet's. args: values of some arguments."""
    args, aux = random_values(symbol, shapes, low, **(args or {}))
    stream = np.random.RandomState(1)
    heads = None if is_loss else [stream.uniform(-1, 1, s).astype("f") for s in symbol.infer_shape(**shapes)[1]]
    with computing(way):
        compare(symbol, args, aux, heads, inputs=tuple(shapes), terms=4 * (terms + FUNCTION))


def examples(count):
    return settings(max_examples=count, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False)


def covers(*names):
    tested.update(names)
    return lambda test: test


side = st.integers(1, 11)
pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
padding = st.tuples(st.integers(0, 2), st.integers(0, 2))
shape = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
flag = st.booleans()


@st.composite
def poolings(draw):
    """Return the shape of the data, and a Pooling's attributes but for its kind."""
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), side, side))
    kernel, stride, pad = draw(st.tuples(pair, pair, padding))
    assume(all(p < k <= n + 2 * p for p, k, n in zip(pad, kernel, sizes[2:])))
    full = draw(flag)
    if full:
        # A window that has only padding is refused.
        last_windows = (-((k - n - 2 * p) // s) * s - p for n, p, k, s in zip(sizes[2:], pad, kernel, stride))
        assume(all(start < n for start, n in zip(last_windows, sizes[2:])))
    words = {"kernel": kernel, "stride": stride, "pad": pad, "pooling_convention": "full" if full else "valid"}
    return sizes, {**words, **draw(st.fixed_dictionaries({"count_include_pad": flag, "global_pool": flag}))}


CONVOLUTIONS = {
    "batch": st.integers(1, 3),
    "groups": st.integers(1, 3),
    "channels": st.integers(1, 4),
    "filters": st.integers(1, 4),
    "image": st.tuples(side, side),
    "bias": flag,
    "sizes": st.fixed_dictionaries({"kernel": pair, "stride": pair, "pad": padding, "dilate": pair}),
}


def moved(sizes, random):
    """Return symbols that move values: expand_dims, squeeze, SwapAxis, slices, reshape_like, UpSampling, and others."""
    axis = random.randrange(len(sizes))
    below, between = axis - len(sizes), random.randint(-len(sizes) - 1, len(sizes))
    begin = random.randrange(sizes[axis])
    end = random.choice([None, random.randint(begin + 1, sizes[axis]), begin - sizes[axis] + 1 or None])
    longer = S.expand_dims(data * 2, axis=between)
    options = {"num_outputs": sizes[axis], "axis": axis, "squeeze_axis": len(sizes) > 1}
    thrice = S.split(S.concat(data, data * 2, S.square(data), dim=axis), num_outputs=3, axis=below)
    found = [longer, S.squeeze(longer, axis=between), S.swapaxes(data, axis, random.randrange(len(sizes)))]
    found += [S.negative(S.split(data, **options)[begin])]
    found += [S.squeeze(longer)] if len(sizes) > 1 or sizes[0] > 1 else []
    found += [S.slice(data, begin=[None] * axis + [begin], end=[None] * axis + [end])]
    step = [random.choice([None, 1, 2, -1, -2]) for _ in sizes]
    found += [S.slice(data * 2, begin=[None] * len(sizes), end=[None] * len(sizes), step=step)]
    found += [S.slice_like(data * 2, found[-2]), S.slice_like(data, found[-2], axes=(below,)), S.ones_like(data) + data]
    found += [S.repeat(data, repeats=random.randint(1, 3), axis=random.choice([axis, below]))]
    found += [S.reshape_like(data * 2, S.transpose(data)), S.broadcast_mul(data, S.zeros_like(data))]
    found += [S.slice_axis(data, axis=random.choice([axis, below]), begin=begin, end=end), thrice[2] * thrice[0]]
    if len(sizes) == 4:
        found += [S.UpSampling(data, scale=random.randint(1, 3), sample_type="nearest")]
        offset = [random.randrange(length) for length in sizes[2:]]
        size = [random.randint(1, length - start) for length, start in zip(sizes[2:], offset)]
        found += [S.Crop(data, h_w=size, offset=offset), S.Crop(data, h_w=size, center_crop=True)]
        found += [S.Crop(data * 2, found[-1], offset=offset)]
    return found


def padded(sizes, random):
    """Return symbols of Pad in each mode; data of one row or column are not mirrored."""
    widths = [random.randint(0, 3) for _ in sizes[2:] for _ in range(2)]
    mirrored = [min(width, sizes[2 + place // 2] - 1) for place, width in enumerate(widths)]
    found = [S.Pad(data, mode=mode, pad_width=(0, 0, 0, 0, *widths)) for mode in ("constant", "edge")]
    found += [S.Pad(data * 2, mode="constant", pad_width=(0, 0, 0, 0, *widths), constant_value=-0.3)]
    return [*found, S.Pad(data, mode="reflect", pad_width=(0, 0, 0, 0, *mirrored))]


def resampled(size, kind):
    """Return a symbol of AdaptiveAvgPooling2D, or of BilinearResize2D with aligned corners, centers or like another."""
    if kind == "mean":
        return S.contrib.AdaptiveAvgPooling2D(data, output_size=size[:1] if size[0] == size[1] else size)
    words = {"scale_height": None, "align_corners": kind == "corners"}
    if kind == "like":  # MXNet leaves the gradient to the other as it was if both have one size
        return S.contrib.BilinearResize2D(data, S.BlockGrad(S.Variable("other")), mode="like")
    return S.contrib.BilinearResize2D(data, height=size[0], width=size[1], **words)


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
