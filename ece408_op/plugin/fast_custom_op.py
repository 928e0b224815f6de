"""Faster calls of a Custom operator with hundreds of arrays, and freeing its memory when MXNet deletes it.

For each array of a call, MXNet's Python code makes and frees an NDArray in four microseconds, which adds up to a
millisecond for ResNet-50. ``FastCustomOp`` replaces MXNet's callbacks by its own, which make only the NDArrays that the
operator reads. ``Deletable`` drops an object's attributes in MXNet's delete callback; before a fork, ``connect`` waits
for such callbacks (``deleting``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

#: The type of the forward and backward callbacks. Arguments: the number of arrays, their handles and tags, the request
#: for each output, is_train, and MXNet's state.
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip
_DELETED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int)

#: MXNet's numbers of the callbacks; and, in the order of their numbers, the tags of arrays and the requests (req).
_DELETE, _FORWARD, _BACKWARD = 0, 1, 2
_TAGS = "in_data", "out_data", "in_grad", "out_grad", "aux"
_REQUESTS = "null", "write", "inplace", "add"

_free = ctypes.PyDLL(mx.base._LIB._name).MXNDArrayFree
_free.argtypes = [ctypes.c_void_p]


class CallArray(mx.nd.NDArray):  # type: ignore[misc]
    """A dense array of a call; ``owner``, the call's arrays, frees its handle."""

    __slots__ = ("owner",)

    def __del__(self) -> None:
        """Free nothing."""


class CallArrays(Sequence[CallArray]):
    """Dense arrays of a call, of one tag. ``handles`` are those of MXNet, which are freed with this object."""

    def __init__(self, handles: list[int]) -> None:
        self.handles = handles

    def __del__(self, free: Callable[[Any], int] = _free) -> None:  # at the interpreter's exit, ``_free`` may be gone
        for handle in self.handles:
            free(handle)

    def __len__(self) -> int:
        return len(self.handles)

    def __getitem__(self, index: Any) -> Any:
        """Return a new NDArray of a handle, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        array = object.__new__(CallArray)
        array.handle, array.writable, array.owner = ctypes.c_void_p(self.handles[index]), True, self
        return array


#: The threads that run MXNet's delete callback of an operator; each holds a lock of MXNet's meanwhile.
deleting: list[int] = []


class Deletable:
    """An object that MXNet makes callbacks for. It drops all its attributes when MXNet deletes it.

    The object and its callbacks are a reference cycle, so the object itself stays until the next garbage collection.
    Gluon makes an operator in each training step, whose GPU memory must be freed earlier.
    """

    @property
    def _ref_holder(self) -> Any:
        """MXNet stores its callbacks here, which keeps them alive."""
        return self._held

    @_ref_holder.setter
    def _ref_holder(self, held: Sequence[Any]) -> None:
        callbacks = held[0][0].callbacks
        own = {**self._own_callbacks(), _DELETE: _DELETED(self._dropped_before(callbacks[_DELETE]))}
        for number, callback in own.items():
            callbacks[number] = ctypes.cast(callback, _FUNCTION)
        self._held = held, own

    def _own_callbacks(self) -> dict[int, Any]:
        """Return the callbacks that replace MXNet's, by number."""
        return {}

    def _dropped_before(self, callback: Any) -> Callable[[Any], int]:
        """Return a delete callback that drops all attributes and then calls MXNet's own ``callback``."""
        mxnets = ctypes.cast(callback, _DELETED)

        def call(context: Any) -> int:
            deleting.append(threading.get_ident())
            try:
                held = self._held
                self.__dict__.clear()
                self._held = held
                return mxnets(context)
            finally:
                deleting.remove(threading.get_ident())

        return call


class FastCustomOp(Deletable, mx.operator.CustomOp):  # type: ignore[misc]
    """A Custom operator on dense arrays; ``mxnet_errors.reported_with_outputs`` must decorate forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        #: The arrays of the last call.
        self._arrays: Any = None

    def release(self) -> None:
        """Free the arrays of the previous call, which are views.

        That takes MXNet's engine half a millisecond. So the objects stay until the next call, whose method may call
        this while it waits for other work.
        """
        self._arrays = None

    def _own_callbacks(self) -> dict[int, Any]:
        return {
            _FORWARD: _CALLBACK(self._called_by_mxnet(self.forward, "out_data")),
            _BACKWARD: _CALLBACK(self._called_by_mxnet(self.backward, "in_grad")),
        }

    def _called_by_mxnet(self, method: Callable[..., None], filled: str) -> Callable[..., bool]:
        """Return the callback for ``method``, forward or backward; filled: the tag of the arrays that it fills."""

        def call(count: int, handles: Any, tags: Any, requests: Any, is_train: int, state: Any) -> bool:
            of_tag: list[list[int]] = [[] for _ in _TAGS]
            for handle, tag in zip(handles[:count], tags[:count]):
                of_tag[tag].append(handle)
            arrays: dict[str, Any] = {name: CallArrays(some) for name, some in zip(_TAGS, of_tag)}
            req = [_REQUESTS[number] for number in requests[: len(arrays[filled])]]
            if filled == "out_data":
                del arrays["in_grad"], arrays["out_grad"]
                arrays["is_train"] = is_train
            try:
                method(req=req, **arrays)
            except Exception:
                return False
            finally:
                self._arrays = arrays
            return True

        return call
