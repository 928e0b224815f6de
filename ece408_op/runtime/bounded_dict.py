"""A dictionary of bounded size, for what would otherwise grow with every new layer."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(OrderedDict[Key, Value]):
    """A dictionary that keeps the last ``capacity`` keys that were set; each operation is safe from any thread."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        while len(self) > self._capacity:
            try:
                self.popitem(last=False)
            except KeyError:  # other threads have taken them
                return
