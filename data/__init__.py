"""The images that the networks classify: Fashion-MNIST at any square size, or a generated sample set in its place.

    images, labels, source = load_test(size=72, count=100)

Public modules: atomic, resize, sample.
"""

from __future__ import annotations

from ._fashion_mnist import Found, TestSet, TrainingSet, cache_folder, find_test, load_test, load_training

__all__ = ("Found", "TestSet", "TrainingSet", "cache_folder", "find_test", "load_test", "load_training")
