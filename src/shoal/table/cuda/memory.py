"""Device memory that grows in place: a wide range of addresses is reserved once, and pages are mapped to it later.

Growing copies and moves nothing, so addresses in a captured CUDA graph stay valid. `Growing` has the same interface
with a plain tensor that is copied when it grows, for Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.errors import CapacityError

_OUT_OF_MEMORY = 2


class Store(Protocol):
    """``parts`` arrays of the same type, each of which can grow."""

    tensor: Tensor
    """``[parts, stride]``; only the first ``size(part)`` elements of a part can be accessed."""

    @property
    def stride(self) -> int: ...
    def size(self, part: int) -> int: ...
    def grow(self, part: int, elements: int) -> None: ...
    def shrink(self) -> None: ...
    def bytes(self) -> int: ...
    def cost(self, elements: int) -> int:
        """The bytes of memory once a part has at least ``elements`` elements."""
        ...


class Growing:
    """Parts that are copied when they grow."""

    def __init__(self, parts: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(parts, 1, dtype=dtype, device=device)
        self._sizes = [1] * parts

    @property
    def stride(self) -> int:
        return self.tensor.shape[1]

    def size(self, part: int) -> int:
        return self._sizes[part]

    def grow(self, part: int, elements: int) -> None:
        """Makes room for at least ``elements`` elements; the contents are kept."""
        self._sizes[part] = max(self._sizes[part], elements)
        if elements > self.stride:
            wider = torch.zeros(len(self._sizes), elements, dtype=self.tensor.dtype, device=self.tensor.device)
            wider[:, : self.stride] = self.tensor
            self.tensor = wider

    def shrink(self) -> None:
        """Frees memory; the contents are lost."""
        self.tensor = self.tensor.new_zeros(len(self._sizes), 1)
        self._sizes = [1] * len(self._sizes)

    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def cost(self, elements: int) -> int:
        return max(self.stride, elements) * len(self._sizes) * self.tensor.element_size()


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Driver:
    """The CUDA driver's calls for addresses and pages."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self.device = device
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.where = _Location(1, device.index)
        self.properties = _Properties(1, 0, self.where, None, (ctypes.c_ubyte * 8)())
        granularity = ctypes.c_size_t()
        self.check(
            self.lib.cuMemGetAllocationGranularity(ctypes.byref(granularity), ctypes.byref(self.properties), 0),
            "cuMemGetAllocationGranularity",
        )
        self.granularity = granularity.value

    @staticmethod
    def check(code: int, call: str) -> None:
        if code:
            raise RuntimeError(f"{call} failed with CUDA driver error {code}")

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        code = self.lib.cuMemAddressReserve(
            ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        )
        self.check(code, "cuMemAddressReserve")
        return address.value

    def map(self, address: int, size: int) -> int:
        """Maps new pages to an address; returns their handle."""
        with torch.cuda.device(self.device):
            handle = ctypes.c_uint64()
            args = (ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self.properties), ctypes.c_uint64(0))
            code = self.lib.cuMemCreate(*args)
            if code == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()  # frees cached blocks that torch does not use
                code = self.lib.cuMemCreate(*args)
            if code == _OUT_OF_MEMORY:
                free, total = torch.cuda.mem_get_info(self.device)
                raise CapacityError(
                    f"{self.device} has {free >> 20} of {total >> 20} MiB free, but {size >> 20} MiB more are needed"
                )
            self.check(code, "cuMemCreate")
            at, length = ctypes.c_uint64(address), ctypes.c_size_t(size)
            code = self.lib.cuMemMap(at, length, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            if code:
                self.lib.cuMemRelease(handle)
            self.check(code, "cuMemMap")
            access = _Access(self.where, 3)
            code = self.lib.cuMemSetAccess(at, length, ctypes.byref(access), ctypes.c_size_t(1))
            if code:
                self.unmap(address, size, handle.value)
            self.check(code, "cuMemSetAccess")
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        self.lib.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size))
        self.lib.cuMemRelease(ctypes.c_uint64(handle))


class _Range:
    """The interface through which torch views a range of addresses as a tensor."""

    def __init__(self, address: int, elements: int, dtype: torch.dtype) -> None:
        kind = "f" if dtype.is_floating_point else "i"
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (elements,),
            "typestr": f"<{kind}{dtype.itemsize}",
            "version": 2,
        }


_later: list[tuple[Any, ...]] = []
"""Memory to release after the capture of a graph: releasing waits for the device, which a capture does not allow."""


def _release(driver: _Driver, base: int, size: int, pages: list[list[tuple[int, int, int]]]) -> None:
    if torch.cuda.is_current_stream_capturing():
        _later.append((driver, base, size, pages))
        return
    torch.cuda.synchronize(driver.device)  # a kernel can still be using it
    for part in pages:
        for address, length, handle in part:
            driver.unmap(address, length, handle)
    driver.lib.cuMemAddressFree(ctypes.c_uint64(base), ctypes.c_size_t(size))


class Mapped:
    """Parts that grow by mapping pages."""

    _drivers: dict[torch.device, _Driver] = {}

    def __init__(self, parts: int, dtype: torch.dtype, device: torch.device, most: int) -> None:
        while _later and not torch.cuda.is_current_stream_capturing():
            _release(*_later.pop())
        self._driver = self._drivers.setdefault(device, None) or _Driver(device)  # type: ignore[arg-type]
        self._drivers[device] = self._driver
        self._item = dtype.itemsize
        self._part_bytes = -(-most * self._item // self._driver.granularity) * self._driver.granularity
        self._base = self._driver.reserve(parts * self._part_bytes)
        self._pages: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
        weakref.finalize(self, _release, self._driver, self._base, parts * self._part_bytes, self._pages)
        for part in range(parts):
            self.grow(part, 1)
        flat = torch.as_tensor(_Range(self._base, parts * self.stride, dtype), device=device)
        self.tensor = flat.view(parts, self.stride)

    @property
    def stride(self) -> int:
        return self._part_bytes // self._item

    def _mapped(self, part: int) -> int:
        return sum(length for _, length, _ in self._pages[part])

    def size(self, part: int) -> int:
        return self._mapped(part) // self._item

    def grow(self, part: int, elements: int) -> None:
        """Makes room for at least ``elements`` elements; the contents stay at their addresses.

        Raises:
            CapacityError: the GPU has no more memory; nothing has changed.
        """
        have = self._mapped(part)
        grain = self._driver.granularity
        more = -(-(elements * self._item - have) // grain) * grain
        if more <= 0:
            return
        if have + more > self._part_bytes:
            raise CapacityError(
                f"an array on {self._driver.device} must have at most {self._part_bytes >> 20} MiB, got "
                f"{have + more >> 20} MiB"
            )
        address = self._base + part * self._part_bytes + have
        self._pages[part].append((address, more, self._driver.map(address, more)))

    def shrink(self) -> None:
        """Frees all but the first pages; the contents are lost."""
        torch.cuda.synchronize(self._driver.device)
        for part in self._pages:
            while len(part) > 1:
                self._driver.unmap(*part.pop())

    def bytes(self) -> int:
        return sum(self._mapped(part) for part in range(len(self._pages)))

    def cost(self, elements: int) -> int:
        grain = self._driver.granularity
        return sum(
            max(self._mapped(part), -(-elements * self._item // grain) * grain) for part in range(len(self._pages))
        )


def most_words(device: torch.device) -> int:
    """The number of 4-byte words that a device has memory for."""
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 1 << 40


def make_store(parts: int, dtype: torch.dtype, device: torch.device, most: int) -> Store:
    """A store on a device. Each part can grow to ``most`` elements, whose addresses are reserved now."""
    return Mapped(parts, dtype, device, most) if device.type == "cuda" else Growing(parts, dtype, device)
