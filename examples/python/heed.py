# SPDX-License-Identifier: Apache-2.0
"""heed from Python: attention variants forward and backward, on NumPy arrays, by the library libheed.

    import heed
    out = heed.attention(q, k, v, variant="dar", causal=True, strength=0.3)

    call = heed.forward(q, k, v, variant="dar", causal=True, strength=np.full(heads, 0.3))
    grads = heed.backward(call, grad_out)
    grads.query, grads.key, grads.value, grads.parameters["strength"]

Arrays    q (batch, query_heads, len_q, dim_qk), k (batch, kv_heads, len_kv, dim_qk), v (batch, kv_heads, len_kv, dim_v), or
          (len, dim) for one head. kv_heads divides heads, which are query_heads, or half of them for differential-v2.
          Arrays are read where they lie: x.transpose(0, 2, 1, 3) of (batch, len, heads, dim) memory, slices and broadcasts
          cost no copy. An array that is reversed, or whose last axis is not dense (strided, transposed, Fortran order), is
          copied, it alone. `out` is never copied. Gradients are new arrays in C order. Masked arrays are refused.
Tensors   of other libraries (PyTorch and all that offer DLPack) are read and written where they lie, in the memory of the
          processor. Results are tensors of the same library: out, lse, steps and reports of that of q, each gradient of that
          of what it is the gradient of. Their libraries see calls as functions without gradients: detach() what has some.
Numbers   q decides: float64 computes with double, float32, float16 and bfloat16 with float. Each array of a call of floats
          may be float32, float16 or bfloat16; out and gradients have the type of q, or that of what they are gradients of.
          NumPy has no bfloat16: Bfloat16(bits) wraps an array of uint16, and arrays of ml_dtypes.bfloat16 are known.
Errors    ValueError with one sentence, the same as in C++; TypeError for what is no array; MemoryError.
Threads   `threads`, set_threads() or OMP_NUM_THREADS; results do not depend on it. Python's other threads run meanwhile. A
          process that was forked (multiprocessing on Linux) after a call with several threads computes with one.
Ctrl-C    ends a call with `visible` at the next answer, and any other when it is done.
Library   $HEED_LIBRARY if it is set; else libheed.so beside this file, in the folder above (as installed), in build/ of the
          tree that this file is in, or where the system finds it. include/heed/c/README.md has the commands that build it.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import pathlib
import signal
import sys
import threading
import time
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint64, c_uint8, c_void_p

from typing import Any, Callable, Iterable, Protocol, Sequence, Union

import numpy as np

__all__ = ["Array", "Tensor", "attention", "forward", "backward", "compare", "Cache", "Call", "Gradients", "Bfloat16", "Parameter", "parameters", "variants", "describe",
           "threads", "set_threads", "version", "instructions", "use_instructions"]


# --- dlpack.h and heed/c.h ------------------------------------------------------------------------------------------

class _Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


_TensorPointer = POINTER(_Tensor)


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class _Parameter(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("tensor", _TensorPointer), ("text", c_char_p), ("number", c_double)]


class _Sized(ctypes.Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(self), **fields)


class _Window(ctypes.Structure):
    _fields_ = [("left", c_int64), ("right", c_int64), ("offset", c_int64), ("align", c_int)]


class _KeyRange(ctypes.Structure):
    _fields_ = [("begin", c_int64), ("end", c_int64)]


_Visible = ctypes.CFUNCTYPE(c_int, c_void_p, c_int64, c_int64, c_int64, c_int64)


class _Mask(_Sized):
    _fields_ = [("size", c_size_t), ("causal", c_int), ("causal_align", c_int), ("causal_offset", c_int64),
                ("windows", POINTER(_Window)), ("window_count", c_size_t),
                ("key_ranges", POINTER(_KeyRange)), ("key_range_count", c_size_t),
                ("key_lengths", POINTER(c_int64)), ("key_length_count", c_size_t),
                ("allowed", _TensorPointer), ("bias", _TensorPointer),
                ("query_documents", POINTER(c_int64)), ("query_document_count", c_size_t),
                ("key_documents", POINTER(c_int64)), ("key_document_count", c_size_t),
                ("alibi", POINTER(c_double)), ("alibi_count", c_size_t), ("alibi_align", c_int), ("soft_cap", c_double),
                ("visible", _Visible), ("visible_context", c_void_p), ("visible_align", c_int),
                ("alibi_offset", c_int64), ("visible_offset", c_int64),
                ("list_start", c_void_p), ("list_start_count", c_size_t),
                ("list_indices", c_void_p), ("list_index_count", c_size_t),
                ("list_query_block", c_int64), ("list_key_block", c_int64), ("list_batch", c_int64), ("list_heads", c_int64)]


class _Packed(_Sized):
    _fields_ = [("size", c_size_t), ("queries", POINTER(c_int64)), ("query_count", c_size_t),
                ("keys", POINTER(c_int64)), ("key_count", c_size_t),
                ("first_query", POINTER(c_int64)), ("first_query_count", c_size_t),
                ("caches", POINTER(c_void_p)), ("cache_count", c_size_t)]


class _Call(_Sized):
    _fields_ = [("size", c_size_t), ("variant", c_char_p),
                ("query", _TensorPointer), ("key", _TensorPointer), ("value", _TensorPointer), ("extra", _TensorPointer),
                ("parameters", POINTER(_Parameter)), ("parameter_count", c_size_t), ("mask", POINTER(_Mask)),
                ("scale", POINTER(c_double)), ("threads", c_int), ("precision", c_int), ("dropout", c_double),
                ("dropout_seed", c_uint64), ("first_query", c_int64),
                ("query_inputs", _TensorPointer), ("key_inputs", _TensorPointer), ("queries_at_end", c_int),
                ("packed", POINTER(_Packed)), ("cache", c_void_p)]


class _Outputs(_Sized):
    _fields_ = [("size", c_size_t), ("out", _TensorPointer), ("lse", _TensorPointer), ("steps", _TensorPointer)]


class _Gradients(_Sized):
    _fields_ = [("size", c_size_t), ("query", _TensorPointer), ("key", _TensorPointer), ("value", _TensorPointer),
                ("extra", _TensorPointer), ("bias", _TensorPointer),
                ("parameters", POINTER(_Parameter)), ("parameter_count", c_size_t),
                ("query_inputs", _TensorPointer), ("key_inputs", _TensorPointer)]


class _Info(_Sized):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("kind", c_int), ("required", c_int), ("ndim", c_int),
                ("shape", c_int64 * 8), ("number", c_double), ("text", c_char_p), ("choices", c_char_p)]


class _Shapes(_Sized):
    _fields_ = [("size", c_size_t), ("out", c_int64 * 4), ("lse", c_int64 * 4), ("steps", c_int64 * 4), ("extra", c_int64 * 4)]


class _Start(_Sized):
    _fields_ = [("size", c_size_t), ("seed", c_uint64), ("depth", c_int64), ("prototypes", c_int64)]


class _CacheSizes(_Sized):
    _fields_ = [("size", c_size_t), ("batch", c_int64), ("kv_heads", c_int64), ("dim_qk", c_int64), ("dim_v", c_int64),
                ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16), ("page_rows", c_int64)]


_INVALID, _NO_MEMORY = 1, 2
_KINDS = ("per head", "tensor", "fixed", "option", "choice", "list")
_LEARNT = ("per head", "tensor")


# --- the library ----------------------------------------------------------------------------------------------------

def _load():
    asked = os.environ.get("HEED_LIBRARY")
    here = pathlib.Path(__file__).resolve().parent
    if asked == "":
        raise ImportError("heed: HEED_LIBRARY is empty, it must name the file libheed.so, or be unset")
    if asked is not None:
        places = [asked]
    else:
        places = [str(path) for path in (folder / "libheed.so" for folder in (here, here.parent, here.parent.parent / "build")) if path.exists()]
        places.append("libheed.so.0")
    try:
        library = ctypes.CDLL(places[0])
    except OSError as error:
        found = "HEED_LIBRARY is " + asked if asked is not None else places[0] + " was looked for beside heed.py, above it, in build/ and by the system"
        raise ImportError("heed: the library libheed could not be loaded (" + str(error) + "); " + found +
                          "; build it by: cmake -S . -B build -DHEED_BUILD_C=ON -DHEED_BUILD_TESTS=OFF -DHEED_BUILD_BENCH=OFF "
                          "-DHEED_BUILD_EXAMPLES=OFF && cmake --build build -t heed_c") from None
    call, outputs, saved = POINTER(_Call), POINTER(_Outputs), c_void_p
    for name, result, arguments in (
            ("forward", c_int, (call, outputs, POINTER(saved))),
            ("backward", c_int, (call, saved, _TensorPointer, outputs, POINTER(_Gradients))),
            ("saved_free", None, (saved,)),
            ("report", c_int, (saved, c_char_p, _TensorPointer)),
            ("report_name", c_char_p, (saved, c_size_t)),
            ("variant_name", c_char_p, (c_size_t,)),
            ("shapes_of", c_int, (call, POINTER(_Shapes))),
            ("describe", c_int, (call, POINTER(_Start), POINTER(_Info), POINTER(c_size_t))),
            ("initial", c_int, (call, POINTER(_Start), POINTER(_Parameter), c_size_t)),
            ("cache_new", c_int, (POINTER(_CacheSizes), POINTER(c_void_p))),
            ("cache_append", c_int, (c_void_p, _TensorPointer, _TensorPointer)),
            ("cache_length", c_int64, (c_void_p,)),
            ("cache_capacity", c_int64, (c_void_p,)),
            ("cache_reserve", c_int, (c_void_p, c_int64)),
            ("cache_truncate", c_int, (c_void_p, c_int64)),
            ("cache_forget", None, (c_void_p,)),
            ("cache_free", None, (c_void_p,)),
            ("last_error", c_char_p, ()),
            ("version", c_char_p, ()),
            ("threads", c_int, ()),
            ("set_threads", c_int, (c_int,)),
            ("instructions", c_char_p, ()),
            ("instructions_name", c_char_p, (c_size_t,)),
            ("use_instructions", c_int, (c_char_p,))):
        function = getattr(library, "heed_" + name, None)
        if function is None:
            raise ImportError("heed: " + places[0] + " has no heed_" + name + ", it is no libheed, or an older one than heed.py")
        function.restype, function.argtypes = result, arguments
    return library


_heed = _load()


def _check(status):
    """Raises what heed_last_error() says unless the status is heed_ok."""
    if status == 0:
        return
    text = _heed.heed_last_error().decode()
    raise {_INVALID: ValueError, _NO_MEMORY: MemoryError}.get(status, RuntimeError)(text)


def _names(function):
    names = []
    while (name := function(len(names))) is not None:
        names.append(name.decode())
    return names


def version() -> str:
    """The version of the library, such as "0.1.0"."""
    return _heed.heed_version().decode()


def variants() -> list[str]:
    """The names of all variants."""
    return _names(_heed.heed_variant_name)


def threads() -> int:
    """How many threads a call computes with unless it says otherwise."""
    return _heed.heed_threads()


def set_threads(count: int) -> None:
    """Sets how many threads calls compute with; 0 for the default: OMP_NUM_THREADS, or all processors, of a
    container no more than its CPU quota."""
    _check(_heed.heed_set_threads(_whole(count, "threads", 0, _INT_MAX)))


def instructions() -> str:
    """The instruction set that computes, such as "x86-64-v3"."""
    return _heed.heed_instructions().decode()


def use_instructions(name: str | None = None) -> None:
    """Computes with another instruction set that this processor has, or with the highest."""
    _check(_heed.heed_use_instructions(None if name is None else name.encode()))


# --- arrays ---------------------------------------------------------------------------------------------------------

class Tensor(Protocol):
    """What offers its memory by DLPack, as tensors of PyTorch do."""

    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class Bfloat16:
    """An array of bfloat16 numbers: `bits`, of uint16, are the upper halves of those of float32."""

    def __init__(self, bits: np.ndarray) -> None:
        if not isinstance(bits, np.ndarray) or bits.dtype != np.uint16:
            raise TypeError("heed.Bfloat16: bits is " + _kind(bits) + ", it must be an array of uint16")
        self.bits = bits

    @classmethod
    def nearest(cls, numbers: np.ndarray) -> Bfloat16:
        """The bfloat16 numbers nearest to those of an array."""
        wide = np.ascontiguousarray(_unmasked(numbers, "numbers"), np.float32).view(np.uint32)
        rounded = (wide + (0x7FFF + (wide >> 16 & 1))) >> 16
        return cls(np.where((wide & 0x7FFFFFFF) > 0x7F800000, wide >> 16 | 0x40, rounded).astype(np.uint16))

    def numbers(self) -> np.ndarray:
        """The same numbers as float32."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


Array = Union[np.ndarray, Bfloat16, Tensor]  # what calls take, and return


class _Lent:
    """The memory of another library's tensor, for NumPy. It is given back with the capsule, when no array refers to this."""

    _kinds = {0: "i", 1: "u", 2: "f", 4: "u", 6: "b"}  # bfloat16 as its bits

    def __init__(self, capsule, name):
        self.capsule = capsule
        tensor = ctypes.cast(_pointer_of(capsule, b"dltensor"), POINTER(_ManagedTensor)).contents.tensor
        self.bfloat16 = tensor.code == 4
        if tensor.code not in self._kinds or tensor.lanes != 1 or tensor.bits % 8:
            raise TypeError("heed: " + name + " has numbers of type code " + str(tensor.code) + " of DLPack, which heed does not read")
        bytes_each, strides = tensor.bits // 8, None
        if tensor.strides:
            strides = tuple(bytes_each * stride for stride in tensor.strides[:tensor.ndim])
        self.__array_interface__ = {
            "version": 3, "shape": tuple(tensor.shape[:tensor.ndim]), "strides": strides,
            "typestr": ("|" if bytes_each == 1 else "<" if sys.byteorder == "little" else ">") + self._kinds[tensor.code] + str(bytes_each),
            "data": ((tensor.data or 0) + tensor.byte_offset, False)}


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = c_void_p, [ctypes.py_object, c_char_p]


def _is_foreign(x):
    return hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray)


def _array_of(x, name):
    """x itself, or the memory of another library's tensor as an array, without a copy."""
    if not _is_foreign(x):
        return x
    device = x.__dlpack_device__()[0]
    if device != 1:
        raise TypeError("heed: " + name + " lies on a device of DLPack's type " + str(int(device)) + ", it must lie in the processor's memory, type 1")
    try:
        lent = _Lent(x.__dlpack__(), name)
    except (BufferError, RuntimeError) as error:
        raise TypeError("heed: " + name + " is " + _kind(x) + " that does not lend its memory: " + str(error)) from error
    array = np.asarray(lent)
    return Bfloat16(array) if lent.bfloat16 else array


def _given_back(result, x):
    """A result as a tensor of the library of x, in the same memory; an array where x is one."""
    if result is None or not _is_foreign(x):
        return result
    names = (kind.__module__.partition(".")[0] for kind in type(x).__mro__)
    library = next((sys.modules[name] for name in names if hasattr(sys.modules[name], "from_dlpack")), None)
    if library is None:
        raise TypeError("heed: the library of " + _kind(x) + " has no from_dlpack(), which makes results its tensors")
    if isinstance(result, Bfloat16):
        return library.from_dlpack(result.bits.view(np.int16)).view(x.dtype)
    return library.from_dlpack(result)


def _kind(x):
    return "an array of " + str(x.dtype) if isinstance(x, np.ndarray) else "of type " + type(x).__name__


def _numbers_of(x):
    """The name of an array's type of numbers."""
    return "bfloat16" if isinstance(x, Bfloat16) else x.dtype.name


def _unmasked(x, name):
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("heed: " + name + " is a masked array, its mask would be lost; give its data, and `allowed` what is visible")
    return x


def _lies_well(array):
    """Can the library read it as it lies: aligned, each row in one piece, and no axis backwards? Where nothing is read, yes."""
    if array.size == 0:
        return True
    steps = [stride for stride, extent in zip(array.strides, array.shape) if extent > 1]
    dense = array.ndim == 0 or array.shape[-1] <= 1 or array.strides[-1] == array.itemsize
    return dense and array.flags.aligned and all(stride >= 0 and stride % array.itemsize == 0 for stride in steps)


class _View:
    """A DLTensor of an array's memory, or of a copy of an array that does not lie well; what is `written` is never copied. The
    memory and the tensor live as long as the view."""

    _codes = {"i": 0, "u": 1, "f": 2, "b": 6}

    def __init__(self, x, name, written=False):
        x = _array_of(_unmasked(x, name), name)
        if not isinstance(x, (np.ndarray, Bfloat16)):
            raise TypeError("heed: " + name + " is " + _kind(x) + ", it must be an array")
        self.numbers = _numbers_of(x)
        bfloat16 = self.numbers == "bfloat16"
        array = x.bits if isinstance(x, Bfloat16) else x
        bytes_each = array.itemsize
        if not bfloat16 and array.dtype.kind not in self._codes:
            raise TypeError("heed: " + name + " is " + _kind(array) + ", which heed does not read")
        if written and not array.flags.writeable:
            raise ValueError("heed: " + name + " is read only")
        if not array.dtype.isnative:
            raise TypeError("heed: " + name + " is " + _kind(array) + ", its bytes must have the machine's order")
        if not _lies_well(array):
            if written:
                raise ValueError("heed: " + name + " has strides of " + str(array.strides) + " bytes, and is written where it lies: the last "
                                 "must be " + str(bytes_each) + ", the others multiples of it, none negative")
            array = array.copy(order="C")
        self.array = array
        axes = c_int64 * max(1, array.ndim)
        self.shape = axes(*array.shape)
        self.strides = axes(*(stride // bytes_each if extent > 1 else 1 for stride, extent in zip(array.strides, array.shape)))
        self.tensor = _Tensor(data=array.ctypes.data, device_type=1, ndim=array.ndim,
                              code=4 if bfloat16 else self._codes[array.dtype.kind], bits=8 * bytes_each, lanes=1,
                              shape=self.shape, strides=self.strides)
        self.pointer = ctypes.pointer(self.tensor)


def _empty_like(x, shape):
    """An array for results of the type of x."""
    return Bfloat16(np.empty(shape, np.uint16)) if isinstance(x, Bfloat16) else np.empty(shape, x.dtype)


_INT_MAX, _INT64 = 2**31 - 1, (-2**63, 2**63 - 1)


def _whole(value, name, least, most):
    """A whole number, which C would cut to its own."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError("heed: " + name + " is " + repr(value) + ", it must be a whole number") from None
    if not least <= number <= most:
        raise ValueError("heed: " + name + " is " + str(number) + ", it must lie between " + str(least) + " and " + str(most))
    return number


def _number(value, name, wanted="a number"):
    _unmasked(value, name)
    try:
        return float(None if isinstance(value, (str, bytes)) else value)
    except (TypeError, ValueError):
        raise TypeError("heed: " + name + " is " + _kind(value) + ", it must be " + wanted) from None
    except OverflowError:
        raise ValueError("heed: " + name + " is beyond the numbers of double") from None


def _numbers_in(kind, values, name):
    values = np.asarray(_array_of(_unmasked(values, name), name))
    wanted = np.float64 if kind is c_double else np.int64
    if kind is c_int64 and values.size:
        if values.dtype.kind not in "iuO":
            raise TypeError("heed: " + name + " holds " + str(values.dtype) + ", it must hold whole numbers")
        for number in values.flat if values.dtype.kind == "O" else (values.min(), values.max()):
            _whole(number, name, *_INT64)
    elif values.dtype.kind not in "iufO":
        raise TypeError("heed: " + name + " holds " + str(values.dtype) + ", it must hold numbers")
    return np.ascontiguousarray(values.ravel(), wanted)


def _list_of(kind, values, name):
    values = _numbers_in(kind, values, name)
    # One element more than there are: an empty list is a list, not none.
    return (kind * (values.size + 1))(*values.tolist()), values.size


def _pair(values, name):
    try:
        first, second = map(operator.index, values)
    except (TypeError, ValueError):
        raise TypeError("heed: " + name + " is " + repr(values) + ", it must be two whole numbers") from None
    return _whole(first, name, *_INT64), _whole(second, name, *_INT64)


class _Asked:
    """A mask's function of Python. What it raises ends the call, and is raised when the library, which knows no exceptions, has
    returned."""

    def __init__(self, visible):
        if not callable(visible):
            raise TypeError("heed: visible is " + _kind(visible) + ", it must be a function of batch, head, query and key")
        self.visible, self.error, self.pointer = visible, None, _Visible(self.answer)

    def answer(self, _, batch, head, query, key):
        if self.error is None:
            try:
                return 1 if self.visible(batch, head, query, key) else 0
            except BaseException as error:
                self.error = error
        return -1  # ends the call

    def during(self, call):
        """The status of call(). Handlers of Ctrl-C run between answers, too, where ctypes would lose what they raise."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return call()

        def handle(*what):
            try:
                handler(*what)
            except BaseException as error:
                self.error = error
        signal.signal(signal.SIGINT, handle)
        try:
            return call()
        finally:
            signal.signal(signal.SIGINT, handler)


class _Request:
    """A struct heed_call, and all that it points to."""

    def __init__(self, q, k, v, variant, extra, causal, window, align, offset, key_range, key_lengths, allowed, bias,
                 documents, lists, list_blocks, alibi, soft_cap, visible, scale, threads, precision, dropout, dropout_seed, first_query,
                 queries_at_end, query_inputs, key_inputs, packed, cache, parameters):
        self.variant = variant
        self.given = {name: x for name, x in (("query", q), ("key", k), ("value", v), ("extra", extra), ("bias", bias),
                                              ("query_inputs", query_inputs), ("key_inputs", key_inputs)) if x is not None}
        self.arrays = {name: _array_of(x, name) for name, x in self.given.items()}
        self.views = {name: self.view(x, name) for name, x in self.arrays.items()}
        self.asked = None
        self.mask = self._mask(causal, window, align, offset, key_range, key_lengths, allowed, documents, lists, list_blocks, alibi,
                               soft_cap, visible)
        self.parameters = parameters
        self.parameter_views, self.parameter_array = _parameters(parameters, variant)
        if precision not in ("storage", "mixed"):
            raise ValueError('heed: precision is ' + repr(precision) + ', it must be "storage" or "mixed"')
        self.struct = _Call(variant=_text(variant, "variant"), mask=ctypes.pointer(self.mask),
                            parameters=self.parameter_array, parameter_count=len(self.parameter_views),
                            threads=_whole(threads, "threads", 0, _INT_MAX), precision=1 if precision == "mixed" else 0,
                            dropout=_number(dropout, "dropout"), dropout_seed=_whole(dropout_seed, "dropout_seed", 0, 2**64 - 1),
                            queries_at_end=1 if queries_at_end else 0)
        self.packed, self.caches = self._sequences(packed, cache, first_query)
        if scale is not None:
            self.struct.scale = ctypes.pointer(c_double(_number(scale, "scale")))
        for name in ("query", "key", "value", "extra", "query_inputs", "key_inputs"):
            if name in self.views:
                setattr(self.struct, name, self.views[name].pointer)

    def _sequences(self, packed, cache, first_query):
        """A struct heed_packed or None, and the caches of the call; sets its own cache and first query."""
        if packed is None:
            self.struct.first_query = _whole(first_query, "first_query", 0, _INT64[1])
            if cache is not None and not isinstance(cache, Cache):
                raise TypeError("heed: cache is " + _kind(cache) + ", it must be a heed.Cache" +
                                (", or packed says where its sequences begin" if isinstance(cache, (list, tuple)) else ""))
            self.struct.cache = cache._handle if cache is not None else None
            return None, [cache] if cache is not None else []
        struct = _Packed()
        of_queries, of_keys = packed if isinstance(packed, tuple) else (packed, None)
        struct.queries, struct.query_count = _list_of(c_int64, of_queries, "packed")
        if of_keys is not None:
            struct.keys, struct.key_count = _list_of(c_int64, of_keys, "packed")
        if np.ndim(first_query) == 0:
            self.struct.first_query = _whole(first_query, "first_query", 0, _INT64[1])
        else:
            struct.first_query, struct.first_query_count = _list_of(c_int64, first_query, "first_query")
        caches = [] if cache is None else list(cache) if isinstance(cache, (list, tuple)) else [cache]
        for one in caches:
            if not isinstance(one, Cache):
                raise TypeError("heed: cache holds one " + _kind(one) + ", it must be a list of heed.Cache")
        if cache is not None:
            struct.caches = (c_void_p * (len(caches) + 1))(*(one._handle for one in caches))
            struct.cache_count = len(caches)
        self.struct.packed = ctypes.pointer(struct)
        return struct, caches

    def view(self, x, name, written=False):
        """A view of an array whose numbers can stand beside those of the query."""
        view = _View(x, name, written)
        query, own = _numbers_of(self.arrays["query"]), view.numbers
        fitting = ("float64", "float32", "float16", "bfloat16")
        if name != "query":
            fitting = fitting[:1] if query == "float64" else fitting[1:2] if name == "bias" else fitting[1:]
        if own not in fitting:
            raise ValueError("heed: " + name + " is " + own + (", " if name == "query" else ", query is " + query + ": ") +
                             "it must be " + ", ".join(fitting[:-1]) + (" or " if len(fitting) > 1 else "") + fitting[-1])
        return view

    def _mask(self, causal, window, align, offset, key_range, key_lengths, allowed, documents, lists, list_blocks, alibi, soft_cap,
              visible):
        struct = _Mask()
        if not (isinstance(causal, (bool, np.bool_)) or isinstance(causal, str) and causal == "bottom_right"):
            raise ValueError("heed: causal is " + repr(causal) + ', it must be True, False or "bottom_right"')
        if not isinstance(align, str) or align not in ("top_left", "bottom_right"):
            raise ValueError("heed: align is " + repr(align) + ', it must be "top_left" or "bottom_right"')
        at, offset = 1 if align == "bottom_right" else 0, _whole(offset, "offset", *_INT64)
        if (at or offset) and not causal and window is None and alibi is None and visible is None:
            raise ValueError("heed: " + ("align is " + repr(align) if at else "offset is " + str(offset)) +
                             ", but there is no causal, window, alibi or visible that it could move")
        if causal:
            struct.causal, struct.causal_offset = 1, offset
            struct.causal_align = 1 if isinstance(causal, str) else at
        if window is not None:
            struct.windows, struct.window_count = (_Window * 1)(_Window(*_pair(window, "window"), offset, at)), 1
        if key_range is not None:
            struct.key_ranges, struct.key_range_count = (_KeyRange * 1)(_KeyRange(*_pair(key_range, "key_range"))), 1
        if key_lengths is not None:
            struct.key_lengths, struct.key_length_count = _list_of(c_int64, key_lengths, "key_lengths")
        if allowed is not None:
            self.views["allowed"] = _View(allowed, "allowed")
            if self.views["allowed"].numbers not in ("bool", "uint8"):
                raise ValueError("heed: allowed is " + self.views["allowed"].numbers + ", it must be bool or uint8")
            struct.allowed = self.views["allowed"].pointer
        if "bias" in self.views:
            struct.bias = self.views["bias"].pointer
        if documents is not None:
            of_queries, of_keys = documents if isinstance(documents, tuple) else (documents, documents)
            struct.query_documents, struct.query_document_count = _list_of(c_int64, of_queries, "documents")
            struct.key_documents, struct.key_document_count = _list_of(c_int64, of_keys, "documents")
        if lists is not None:
            self._lists(struct, lists, list_blocks)
        elif tuple(list_blocks) != (1, 1):
            raise ValueError("heed: list_blocks is " + repr(list_blocks) + ", but there are no lists")
        if alibi is not None:
            struct.alibi, struct.alibi_count = _list_of(c_double, alibi, "alibi")
            struct.alibi_align, struct.alibi_offset = at, offset
        if soft_cap is not None:
            struct.soft_cap = _number(soft_cap, "soft_cap")
            if not 0 < struct.soft_cap < np.inf:  # 0 stands for none in the struct
                raise ValueError("heed: soft_cap is " + str(soft_cap) + ", it must be positive and finite")
        if visible is not None:
            self.asked = _Asked(visible)
            struct.visible, struct.visible_align, struct.visible_offset = self.asked.pointer, at, offset
        return struct

    def _lists(self, struct, lists, blocks):
        struct.list_query_block, struct.list_key_block = _pair(blocks, "list_blocks")
        if isinstance(lists, tuple):
            if len(lists) not in (2, 4):
                raise ValueError("heed: lists has %d parts, it must be (start, indices) or (start, indices, batch, heads)" % len(lists))
            start, indices = (_numbers_in(c_int64, part, "lists") for part in lists[:2])
            batch, heads = lists[2:] or (1, 1)
        else:
            keep = np.asarray(_array_of(_unmasked(lists, "lists"), "lists"))
            if keep.ndim != 4:
                raise ValueError("heed: lists has %d extents, a table has 4: (batch or 1, heads or 1, query blocks, key blocks)" % keep.ndim)
            batch, heads = keep.shape[:2]
            rows = (keep != 0).reshape(-1, keep.shape[3])
            start, indices = np.concatenate(([0], rows.sum(1).cumsum())), np.ascontiguousarray(rows.nonzero()[1], np.int64)
            start = np.ascontiguousarray(start, np.int64)
        struct.list_batch, struct.list_heads = (_whole(n, "lists", *_INT64) for n in (batch, heads))
        self.lists = start, indices  # the struct points to them
        struct.list_start, struct.list_start_count = start.ctypes.data, start.size
        struct.list_indices, struct.list_index_count = indices.ctypes.data, indices.size

    def run(self, function, *arguments):
        """Calls a function of the library. Raises the error of the mask's own function, or that of the library."""
        def call():
            return function(byref(self.struct), *arguments)
        status = call() if self.asked is None else self.asked.during(call)
        if self.asked is not None and self.asked.error is not None:
            error, self.asked.error = self.asked.error, None
            raise error
        _check(status)


def _text(text, name):
    if not isinstance(text, str):
        raise TypeError("heed: " + name + " is " + _kind(text) + ", it must be a str")
    return text.encode()


def _parameters(given, variant):
    """Views of the arrays, and an array of structs. Whole numbers are taken as floats, but for lists of them."""
    lists = {parameter.name for parameter in describe(variant) if parameter.kind == "list"} if given else ()
    views, structs = {}, []
    for name, value in given.items():
        value = _array_of(_unmasked(value, name), name)
        if isinstance(value, (list, tuple)):
            value = np.asarray(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and name not in lists:
            value = value.astype(np.float64)
        struct = _Parameter(name=name.encode())
        views[name] = None
        if isinstance(value, str):
            struct.text = value.encode()
        elif isinstance(value, (np.ndarray, Bfloat16)) and value.shape != ():
            views[name] = _View(value, name)
            struct.tensor = views[name].pointer
        else:
            struct.number = _number(value, name, "a number, a str or an array")
        structs.append(struct)
    return views, (_Parameter * max(1, len(structs)))(*structs)


def _infos(call, start=None):
    """What heed_describe() says of a call's parameters."""
    start, count = None if start is None else byref(start), c_size_t(0)
    _check(_heed.heed_describe(byref(call), start, None, byref(count)))
    infos = (_Info * count.value)()
    for info in infos:
        info.size = ctypes.sizeof(_Info)
    _check(_heed.heed_describe(byref(call), start, infos, byref(count)))
    return infos


class Parameter:
    """A parameter or option of a variant.

    name      as keywords have it; a dot may be written as an underscore
    kind      "per head" and "tensor" are learnt; "fixed" (a tensor), "option" (a number), "choice" (a str), "list"
    required  whether a call must give it
    default   the number or str without it; None for tensors
    choices   of a choice, the words that there are
    """

    def __init__(self, info):
        self.name, self.kind, self.required = info.name.decode(), _KINDS[info.kind], bool(info.required)
        self.learnt = self.kind in _LEARNT
        self.in_use = info.ndim > 0
        self.choices = info.choices.decode().split(", ") if info.choices is not None else None
        self.default = None
        if info.text is not None:
            self.default = info.text.decode()
        elif self.kind == "option" or self.kind == "per head" and self.in_use:
            self.default = info.number

    def __repr__(self):
        more = ", required" if self.required else "" if self.default is None else ", default " + repr(self.default)
        return "<" + self.name + ": " + self.kind + more + (", one of " + ", ".join(self.choices) if self.choices else "") + ">"


_described = {}


def describe(variant: str) -> list[Parameter]:
    """The parameters and options of a variant, a list of Parameter."""
    if variant not in _described:
        view = _View(np.zeros((1, 2, 1, 4)), "query")
        call = _Call(variant=_text(variant, "variant"), query=view.pointer, value=view.pointer)
        _described[variant] = [Parameter(info) for info in _infos(call)]
    return list(_described[variant])


def _full_names(variant, keywords):
    """Keywords as names of parameters: `lambda_` stands for lambda, gate_weight for gate.weight."""
    known = {parameter.name for parameter in describe(variant)} if keywords else set()
    spoken = {name.replace(".", "_"): name for name in known} | {name + "_": name for name in known}
    return {name if name in known else spoken.get(name, name): value for name, value in keywords.items()}


def parameters(variant: str, q: Array, v: Array, *, seed: int = 1, depth: int = 1, prototypes: int = 16, **given: Any) -> dict[str, Any]:
    """What a variant's learnt parameters begin with, a dict of arrays by name: keywords of attention() and forward().

    q, v        arrays of the shapes and types of the calls to come
    seed        of those that begin with random numbers
    depth       of the layer, from 1; lambda of differential-v1 depends on it
    prototypes  per head
    given       parameters that have their values already, and options on which shapes depend; they are in the dict, too
    """
    views = _View(q, "query"), _View(v, "value")
    given = _full_names(variant, given)
    parameter_views, structs = _parameters(given, variant)
    call = _Call(variant=_text(variant, "variant"), query=views[0].pointer, value=views[1].pointer,
                 parameters=structs, parameter_count=len(parameter_views))
    start = _Start(seed=_whole(seed, "seed", 0, 2**64 - 1), depth=_whole(depth, "depth", 1, _INT64[1]),
                   prototypes=_whole(prototypes, "prototypes", 1, _INT64[1]))
    wide = _wide(_array_of(q, "query"))
    found, before = {}, _infos(call)
    for info, at_start in zip(_infos(call, start), before):
        name, kind = info.name.decode(), _KINDS[info.kind]
        if name in given:
            found[name] = given[name]
        elif kind in _LEARNT and info.ndim > 0:
            found[name] = np.empty(tuple(info.shape[:info.ndim]), wide)
        elif kind == "option" and info.number != at_start.number:
            found[name] = info.number  # an option that depends on the depth
    targets = {name: x for name, x in found.items() if name not in given and isinstance(x, np.ndarray)}
    views, structs = _parameters(targets, variant)
    _check(_heed.heed_initial(byref(call), byref(start), structs, len(views)))
    return {name: _given_back(x, q) if name in targets else x for name, x in found.items()}


# --- calls ----------------------------------------------------------------------------------------------------------

class Cache:
    """Keys and values of a growing sequence, or of `batch` sequences that grow together, for decoding:

        cache = heed.Cache(1, kv_heads, dim_qk, dim_v)
        cache.append(k, v)                                      # (1, kv_heads, n, dim): the prompt, then token by token
        out = heed.attention(q, variant="dar", cache=cache)     # q are the last tokens of the cache

    dtype      what numbers are stored as, rounded: "float32", "float16", "bfloat16" or "int8" (a byte, with a scale per row)
               for calls of floats, "float64" for those of doubles
    page_rows  memory is taken in pages of so many tokens, a multiple of 64; nothing is copied as it grows

    len(cache) is the number of its tokens. It keeps from call to call what a score computes of each key alone; so calls must
    be of one variant with the same parameters, until forget(). One call at a time may use it. It has no backward().
    """

    _dtypes = {"float64": (2, 64), "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int8": (0, 8)}
    _handle = None

    def __init__(self, batch: int, kv_heads: int, dim_qk: int, dim_v: int, dtype: Any = "float32", page_rows: int = 256) -> None:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        if name not in self._dtypes:
            raise ValueError("heed: dtype is " + repr(dtype) + ", it must be one of " + ", ".join(self._dtypes))
        self._free, self._in_use = _heed.heed_cache_free, threading.Lock()
        code, bits = self._dtypes[name]
        own = dict(batch=batch, kv_heads=kv_heads, dim_qk=dim_qk, dim_v=dim_v, page_rows=page_rows)
        sizes = _CacheSizes(code=code, bits=bits, lanes=1, **{key: _whole(size, key, 0, _INT64[1]) for key, size in own.items()})
        handle = c_void_p()
        _check(_heed.heed_cache_new(byref(sizes), byref(handle)))
        self._handle = handle.value

    def __del__(self):
        if self._handle:
            self._free(self._handle)
            self._handle = None

    def __reduce__(self):
        raise TypeError("heed: a Cache is neither copied nor pickled; append the same keys and values to another one")

    def __len__(self) -> int:
        return _heed.heed_cache_length(self._handle)

    def __bool__(self):
        return True

    @property
    def capacity(self) -> int:
        """Tokens for which it has memory."""
        return _heed.heed_cache_capacity(self._handle)

    def append(self, k: Array, v: Array) -> None:
        """Adds tokens: k (batch, kv_heads, n, dim_qk), v (batch, kv_heads, n, dim_v)."""
        views = _View(k, "k"), _View(v, "v")
        with _use([self]):
            _check(_heed.heed_cache_append(self._handle, views[0].pointer, views[1].pointer))

    def reserve(self, length: int) -> None:
        """Takes memory for `length` tokens now."""
        with _use([self]):
            _check(_heed.heed_cache_reserve(self._handle, _whole(length, "length", 0, _INT64[1])))

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        with _use([self]):
            _check(_heed.heed_cache_truncate(self._handle, _whole(length, "length", 0, _INT64[1])))

    def forget(self) -> None:
        """Forgets what calls have kept of its keys, so that the next may be of another variant."""
        with _use([self]):
            _heed.heed_cache_forget(self._handle)


@contextlib.contextmanager
def _use(caches):
    """Keeps caches for one call."""
    taken = []
    try:
        for cache in caches:
            if not cache._in_use.acquire(blocking=False):
                raise RuntimeError("heed: the cache is in use by another call, one at a time may use it")
            taken.append(cache)
        yield
    finally:
        for cache in taken:
            cache._in_use.release()


class Call:
    """What forward() computed, and what backward() needs.

    out      (batch, heads, len_q, dim_v), of the type of q; (len_q, dim_v) where q has two axes; read only where backward()
             needs it
    lse      (batch, heads, len_q, maps): log sum exp of the scores, with with_lse
    steps    (batch, heads, len_q, columns): with with_steps the time that each row takes, or what each of its steps leaves,
             where rows take steps as an option says (dialectical: halting="adaptive" or "outside")
    reports  a dict of what the variant reports of its rows, (batch, heads, len_q, 1) each

    The arrays of the call, an `out` of the caller's among them, must stay as they are until backward().
    """

    def __init__(self, request, results, saved, save):
        self._request, self._results, self._saved = request, results, saved
        self._free = _heed.heed_saved_free  # a module that is being torn down has lost the global name
        q = request.given["query"]
        out = results.out if not save or _is_foreign(results.given_out) or _is_foreign(q) else _read_only(results.out)
        self.out = results.given_out if _is_foreign(results.given_out) else _given_back(out, q)
        self.lse, self.steps = _given_back(results.lse, q), _given_back(results.steps, q)

    def __reduce_ex__(self, protocol):
        raise TypeError("heed: a Call can be neither copied nor pickled: the library keeps what backward() needs, once; keep its out, lse and steps")

    def __del__(self):
        if getattr(self, "_saved", None):
            self._free(self._saved)
            self._saved = None

    @property
    def reports(self) -> dict[str, Array]:
        found = {}
        for name in _names(lambda index: _heed.heed_report_name(self._saved, index)):
            found[name] = np.empty(self._results.rows)
            _check(_heed.heed_report(self._saved, name.encode(), _View(found[name], name).pointer))
        return {name: _given_back(x, self._request.given["query"]) for name, x in found.items()}


def _read_only(x):
    """The same array, for reading."""
    if isinstance(x, Bfloat16):
        return Bfloat16(_read_only(x.bits))
    view = x.view()
    view.flags.writeable = False
    return view


class Gradients:
    """Gradients, each in the shape and type of what it is the gradient of; None for what the call has not.

    query, key, value, extra, bias, query_inputs, key_inputs; `parameters`, a dict by name.
    """

    def __init__(self):
        self.query = self.key = self.value = self.extra = self.bias = self.query_inputs = self.key_inputs = None
        self.parameters = {}


def _wide(x):
    """What a call computes with whose query is x."""
    return np.float64 if not isinstance(x, Bfloat16) and x.dtype == np.float64 else np.float32


class _Results:
    """A struct heed_outputs, and the arrays that it points to."""

    def __init__(self, request, q, out, with_lse, with_steps):
        self.shapes = _Shapes()
        _check(_heed.heed_shapes_of(byref(request.struct), byref(self.shapes)))
        self.rows = tuple(self.shapes.out)[:3] + (1,)
        extra = request.arrays.get("extra")
        if extra is not None and extra.shape[-1:] == (1,) and self.shapes.extra[3] > 1:
            raise ValueError("heed: extra has one column, it needs " + str(self.shapes.extra[3]) + '; grain="per_head" takes one')
        if out is None:
            out = _empty_like(q, tuple(self.shapes.out)[-len(q.shape):])
        self.given_out, self.out = out, _array_of(out, "out")
        self.lse = np.empty(tuple(self.shapes.lse), _wide(q)) if with_lse else None
        # If the variant gives none, the library says why when it gets memory for some.
        self.steps = np.empty(tuple(self.shapes.steps) if self.shapes.steps[3] else self.rows, _wide(q)) if with_steps else None
        self.views = {name: request.view(x, name, written=True) for name, x in (("out", self.out), ("lse", self.lse), ("steps", self.steps)) if x is not None}
        self.struct = _Outputs(**{name: view.pointer for name, view in self.views.items()})


def forward(q: Array, k: Array | None = None, v: Array | None = None, variant: str = "sdpa", *, save: bool = True,
            out: Array | None = None, with_lse: bool = False, with_steps: bool = False, extra: Array | None = None,
            causal: bool | str = False, window: tuple[int, int] | None = None, align: str = "top_left", offset: int = 0,
            key_range: tuple[int, int] | None = None, key_lengths: Sequence[int] | None = None, allowed: Array | None = None,
            bias: Array | None = None, documents: Any = None, lists: Any = None, list_blocks: tuple[int, int] = (1, 1),
            alibi: Sequence[float] | None = None, soft_cap: float | None = None,
            visible: Callable[[int, int, int, int], bool] | None = None, scale: float | None = None, threads: int = 0, precision: str = "storage", dropout: float = 0.0,
            dropout_seed: int = 0, first_query: int | Sequence[int] = 0, queries_at_end: bool = False,
            query_inputs: Array | None = None, key_inputs: Array | None = None, packed: Any = None,
            cache: Cache | Sequence[Cache] | None = None, **parameters: Any) -> Call:
    """Attention, and what backward() needs of it: returns a Call.

    variant       a name of variants()
    extra         the intent of "intent" (batch, heads, len_q, dim_v or 1), the logits of lambda of "differential-v2"
    out           an array to write to, else a new one; must not overlap q, k and v
    with_lse, with_steps   what else is asked for

    Who sees whom; parts that are given all apply:
    causal        True: query i sees keys up to its own position. "bottom_right": the last query stands at the last key
    window        (left, right): a query at p sees keys in [p - left, p + right]; -1 leaves a side open
    align, offset where query 0 stands on the axis of keys, "top_left" or "bottom_right", and how much further; of causal,
                  window, alibi and visible, and refused without any of them
    key_range     (begin, end): all queries see these keys only
    key_lengths   how many keys each batch has
    allowed       bool or uint8, true where visible, (batch or 1, heads or 1, len_q or 1, len_kv)
    documents     ids (batch, len) of queries and keys, or a tuple of both: a query sees keys of its own document
    lists         (start, indices): row n of query blocks sees the key blocks indices[start[n]:start[n + 1]], which ascend; rows
                  of several tables one after the other as (start, indices, batch, heads). Or an array (batch or 1, heads or 1,
                  query blocks, key blocks), not 0 where a block is seen
    list_blocks   queries and keys in a block of lists
    visible       visible(batch, head, query, key) -> bool; asked for each pair, slow. What it raises ends
                  the call

    What is added to scores:
    bias          of the shape of allowed; float32 in calls of floats, float64 in those of doubles. -infinity hides
    alibi         slopes, one per head: -slope |p - key|
    soft_cap      c: scale q.k becomes c tanh(scale q.k / c)

    scale         factor on q.k; None: 1 / sqrt(width of one score map)
    threads       0: as set_threads() says
    precision     "storage", or "mixed": products of bfloat16 with sums of float
    dropout       the share of weights that become 0, which dropout_seed chooses
    first_query   where query 0 stands among the keys, for variants that read positions
    queries_at_end  True: the queries are the last tokens of the keys, as in decoding; a mask that would place fewer queries
                  than keys at the first of them, "top_left" without an offset, is refused
    packed        sequences of lengths of their own lie one behind the other, without padding, in arrays (1, heads, total, dim):
                  numbers 0, ..., total, where each begins and the last one ends; (queries, keys) where keys have others. Each
                  has the bits of a call of its own: positions and masks begin anew in each, key_lengths has a number per
                  sequence, mask and bias are those of a padded batch (sequences or 1, heads or 1, longest, longest).
                  first_query may be a list, one per sequence
    cache         a Cache in place of k and v: q are its last tokens. With packed, a list of one per sequence, of batch 1
    parameters    by name, see describe(): a number, a str for a choice, or an array. A dot may be written as an
                  underscore, and lambda as lambda_
    """
    if "mask" in parameters:
        raise TypeError("heed.forward: there is no keyword mask, what is visible is called allowed")
    request = _Request(q, k, v, variant, extra, causal, window, align, offset, key_range, key_lengths, allowed, bias, documents,
                       lists, list_blocks, alibi, soft_cap, visible, scale, threads, precision, dropout, dropout_seed, first_query,
                       queries_at_end, query_inputs, key_inputs, packed, cache, _full_names(variant, parameters))
    results = _Results(request, request.arrays["query"], out, with_lse, with_steps)
    saved = c_void_p()
    call = Call(request, results, saved, save)  # frees what is saved
    with _use(request.caches):
        request.run(_heed.heed_forward, byref(results.struct), byref(saved) if save else None)
    return call


def attention(q: Array, k: Array | None = None, v: Array | None = None, variant: str = "sdpa", **options: Any) -> Array:
    """Attention: returns out, an array. Options and parameters are those of forward(); nothing is kept for backward()."""
    return forward(q, k, v, variant, save=False, **options).out


def backward(call: Call, grad_out: Array, *, grad_lse: Array | None = None, grad_steps: Array | None = None) -> Gradients:
    """The gradients of sum(out * grad_out), plus sum(lse * grad_lse) and sum(steps * grad_steps), for all inputs and all
    learnt parameters of the call that forward() made: returns Gradients. A parameter that is one number has a number for
    its gradient.
    """
    request = call._request
    if not call._saved:
        raise ValueError("heed.backward: the call has saved nothing, it must be one of forward() with save=True")
    from_struct = _Outputs()
    views = {name: request.view(x, "grad_" + name) for name, x in (("out", grad_out), ("lse", grad_lse), ("steps", grad_steps)) if x is not None}
    for name, view in views.items():
        setattr(from_struct, name, view.pointer)
    grads, to = Gradients(), _Gradients()
    target_views = {}
    for name, x in request.arrays.items():
        made = _empty_like(x, x.shape)
        setattr(grads, name, _given_back(made, request.given[name]))
        target_views[name] = _View(made, "grad_" + name)
        setattr(to, name, target_views[name].pointer)
    made = {}
    for parameter in describe(request.variant):
        given = request.parameter_views.get(parameter.name)
        if not parameter.learnt:
            continue
        if given is not None and given.array.size > 0:
            narrow = given.array.dtype not in (np.float32, np.float64)
            made[parameter.name] = np.empty(given.array.shape, np.float32 if narrow else given.array.dtype)
        elif given is None and (parameter.name in request.parameter_views or parameter.in_use and not parameter.required):
            made[parameter.name] = np.empty(1, _wide(request.arrays["query"]))
    target_views["parameters"], to.parameters = _parameters(made, request.variant)
    to.parameter_count = len(made)
    request.run(_heed.heed_backward, call._saved, call._results.views["out"].pointer, byref(from_struct), byref(to))
    for name, x in made.items():
        grads.parameters[name] = _given_back(x, request.parameters.get(name)) if request.parameter_views.get(name) is not None else x[0]
    return grads


# --- comparison -----------------------------------------------------------------------------------------------------

def _problem(variant, heads, length, dim, dtype, rng):
    """Random inputs of a variant, and keywords with its first parameters and what else it needs."""
    def draw(*shape):
        return rng.normal(size=shape).astype(dtype)

    q, one = draw(1, heads, length, dim), _View(draw(1, 1, length, dim), "value")
    shapes, query = _Shapes(), _View(q, "query")
    call = _Call(variant=_text(variant, "variant"), query=query.pointer, key=one.pointer, value=one.pointer)
    _check(_heed.heed_shapes_of(byref(call), byref(shapes)))
    k, v = (draw(1, shapes.out[1], length, dim) for _ in range(2))
    options = parameters(variant, q, v)
    if shapes.extra[3] > 0:
        options["extra"] = draw(*shapes.extra)
    return (q, k, v), options


def compare(names: Iterable[str] | None = None, *, heads: int = 4, length: int = 512, dim: int = 64, causal: bool | str = True,
            dtype: Any = np.float32, threads: int = 1, turns: int = 7) -> list[tuple[str, float, float, float, float]]:
    """What variants cost, as a table on standard output: milliseconds of forward and backward, the medians of calls by turns,
    and how many times those of the first variant they are. Returns the rows, (name, forward, ratio, backward, ratio).

    names     of variants(), all of them without it
    heads     of queries (1, heads, length, dim), and of keys and values; some variants join the heads of queries by two
    threads   of each call; 0: as set_threads() says
    """
    names = list(variants() if names is None else names)
    rng, problems = np.random.default_rng(1), {}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for name in names:
        problems[name] = _problem(name, heads, length, dim, dtype, rng)
    for turn in range(_whole(turns, "turns", 1, 10**6) + 1):
        for name, ((q, k, v), options) in problems.items():
            begin = time.perf_counter()
            call = forward(q, k, v, name, causal=causal, threads=threads, **options)
            middle = time.perf_counter()
            backward(call, np.ones_like(call.out))
            if turn > 0:  # the first one warms up
                times[name][0].append(1e3 * (middle - begin))
                times[name][1].append(1e3 * (time.perf_counter() - middle))
    rows: list[tuple[str, float, float, float, float]] = []
    for name in names:
        there, back = (float(np.median(of)) for of in times[name])
        first = rows[0] if rows else (name, there, 1.0, back, 1.0)
        rows.append((name, there, there / first[1], back, back / first[3]))
    print("%-22s %10s %7s %11s %7s" % ("variant", "forward ms", "times", "backward ms", "times"))
    for row in rows:
        print("%-22s %10.3f %7.2f %11.3f %7.2f" % row)
    return rows
