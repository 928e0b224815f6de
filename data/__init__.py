"""The images that the networks are run on.

Fashion-MNIST at any square size, or a generated sample set that stands in for it: ``load_test(size=72, count=100)``.

Public modules: atomic, make_sample, resize.
"""

from __future__ import annotations

from ._fashion_mnist import Found, TestSet, TrainingSet, find_test, load_test, load_training

__all__ = ("Found", "TestSet", "TrainingSet", "find_test", "load_test", "load_training")
