"""Virtual memory of the fake driver: reservations, physical memory and mappings, all only numbers.

It is an ``AssertionError`` if a range is not made of whole granules, is outside a reservation, or is over a mapping or
part of one, or if anything is given back twice. The fake chooses where reservations are, and they stay for good; a test
may limit the number of bytes of all reservations.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fake_calls import CUresult, FakeCalls, Handle, View, as_int

GRANULE = 2 << 20
_DEVICES = 8

CUmemAllocationType = enum.IntEnum("CUmemAllocationType", {"CU_MEM_ALLOCATION_TYPE_PINNED": 1})
CUmemLocationType = enum.IntEnum("CUmemLocationType", {"CU_MEM_LOCATION_TYPE_DEVICE": 1})
CUmemAccess_flags = enum.IntEnum("CUmemAccess_flags", {"CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3})
CUmemAllocationGranularity_flags = enum.IntEnum(
    "CUmemAllocationGranularity_flags", {"CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0}
)


class CUdeviceptr(Handle): ...


class CUmemGenericAllocationHandle(Handle): ...


class CUmemLocation(View):
    def __init__(self, owner: object) -> None:
        super().__init__(owner, "location")

    type = property(lambda self: self._read()[0], lambda self, value: self._read().__setitem__(0, value))
    id = property(lambda self: self._read()[1], lambda self, value: self._read().__setitem__(1, value))


class _Located:
    def __init__(self) -> None:
        self.__dict__["location"] = [None, 0]

    location = property(CUmemLocation, lambda self, value: self.__dict__.__setitem__("location", list(value._read())))


class CUmemAllocationProp(_Located):
    type = None


class CUmemAccessDesc(_Located):
    flags = None


@dataclass
class Memory:
    nbytes: int
    device: int
    held: bool = True


@dataclass
class Mapping:
    nbytes: int
    memory: int
    access: bool = False


class FakeMemory(FakeCalls):
    CUmemAllocationType = CUmemAllocationType
    CUmemLocationType = CUmemLocationType
    CUmemAccess_flags = CUmemAccess_flags
    CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags
    CUmemAllocationProp = CUmemAllocationProp
    CUmemAccessDesc = CUmemAccessDesc

    def __init__(self) -> None:
        super().__init__()
        self.reservations: dict[int, int] = {}  # bytes by start
        self.most_reserved: int | None = None  # limit for the bytes of all reservations
        self.mappings: dict[int, Mapping] = {}  # by start
        self.memories: dict[int, Memory] = {}  # by handle, including those given back
        self._next_range = 0x1000_1240_0000  # not a multiple of 4 GiB, and where no process has its own memory

    def leaks(self) -> list[str]:
        """The memory that is still mapped or held."""
        mapped = [f"{mapping.nbytes:#x} bytes mapped at {start:#x}" for start, mapping in self.mappings.items()]
        return mapped + [f"memory {handle:#x}" for handle, memory in self.memories.items() if memory.held]

    def _device(self, location: CUmemLocation) -> int:
        kind, device = location._read()
        assert kind is CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE and 0 <= device < _DEVICES, (kind, device)
        return device

    def _check_properties(self, properties: CUmemAllocationProp) -> int:
        assert type(properties) is CUmemAllocationProp, properties
        assert properties.type is CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, properties.type
        return self._device(properties.location)

    def cuMemGetAllocationGranularity(self, properties, option):
        self._check_properties(properties)
        assert option is CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM, option
        return self._answer("cuMemGetAllocationGranularity", GRANULE)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, hint: int, flags: int):
        _check_granules(nbytes)
        assert alignment == hint == flags == 0, (alignment, hint, flags)
        if result := self._enter("cuMemAddressReserve"):
            return result, None
        if self.most_reserved is not None and sum(self.reservations.values()) + nbytes > self.most_reserved:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        address = self._next_range
        self._next_range = address + nbytes + 16 * GRANULE
        self.reservations[address] = nbytes
        return result, CUdeviceptr(address)

    def cuMemCreate(self, nbytes: int, properties, flags: int):
        device = self._check_properties(properties)
        _check_granules(nbytes)
        assert flags == 0, flags
        handle = next(self._handles)
        answer = self._answer("cuMemCreate", CUmemGenericAllocationHandle(handle))
        if answer[0] == 0:
            self.memories[handle] = Memory(nbytes, device)
        return answer

    def _held_memory(self, memory: int) -> Memory:
        found = self.memories.get(as_int(memory))
        assert found is not None and found.held, f"no memory {memory!r}"
        return found

    def cuMemRelease(self, memory: int):
        found = self._held_memory(memory)
        if (result := self._enter("cuMemRelease")) == 0:
            found.held = False
        return (result,)

    def is_reserved(self, address: int, nbytes: int = 1) -> bool:
        return any(start <= address and address + nbytes <= start + n for start, n in self.reservations.items())

    def is_mapped(self, address: int) -> bool:
        return bool(self._overlapping(address, 1))

    def _overlapping(self, address: int, nbytes: int) -> list[int]:
        """The mappings that have a byte of a range, by their starts."""
        end = address + nbytes
        return [start for start, one in self.mappings.items() if start < end and address < start + one.nbytes]

    def _whole(self, address: int, nbytes: int) -> dict[int, Mapping]:
        """The mappings that fill a range exactly."""
        found, position = {}, address
        while position < address + nbytes:
            assert position in self.mappings, f"no mapping starts at {position:#x}"
            found[position] = self.mappings[position]
            position += found[position].nbytes
        assert position == address + nbytes and nbytes > 0, f"{address + nbytes:#x} lies inside a mapping"
        return found

    def cuMemMap(self, address: int, nbytes: int, offset: int, memory: int, flags: int):
        address, memory = as_int(address), as_int(memory)
        _check_granules(nbytes, address)
        assert offset == 0 and flags == 0, (offset, flags)
        assert self.is_reserved(address, nbytes), f"{address:#x} + {nbytes:#x} is not reserved"
        assert not self._overlapping(address, nbytes), f"{address:#x} + {nbytes:#x} is mapped"
        available = self._held_memory(memory).nbytes
        if result := self._enter("cuMemMap"):
            return (result,)
        if nbytes != available:
            return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        self.mappings[address] = Mapping(nbytes, memory)
        return (result,)

    def cuMemUnmap(self, address: int, nbytes: int):
        whole = self._whole(as_int(address), nbytes)
        if (result := self._enter("cuMemUnmap")) == 0:
            for start in whole:
                del self.mappings[start]
        return (result,)

    def cuMemSetAccess(self, address: int, nbytes: int, descriptions, count: int):
        assert isinstance(descriptions, (list, tuple)) and count == len(descriptions) == 1, descriptions
        (description,) = descriptions
        assert type(description) is CUmemAccessDesc, description
        assert description.flags is CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, description.flags
        device = self._device(description.location)
        whole = self._whole(as_int(address), nbytes)
        assert all(self.memories[mapping.memory].device == device for mapping in whole.values()), f"not on {device}"
        if (result := self._enter("cuMemSetAccess")) == 0:
            for mapping in whole.values():
                mapping.access = True
        return (result,)


def _check_granules(*values: int) -> None:
    for value in values:
        assert isinstance(value, int) and value % GRANULE == 0, f"{value:#x} is no multiple of {GRANULE:#x}"
    assert values[0] > 0, "no bytes"
