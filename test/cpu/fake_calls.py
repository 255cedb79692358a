"""What all calls of the fake driver share: results, handles, and failures that a test asks for."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections import defaultdict
from dataclasses import dataclass


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class Handle:
    def __init__(self, value: int | Handle = 0) -> None:
        self._value = int(value)

    def __int__(self) -> int:
        return self._value


class View:
    """A field that is a bare pointer into its struct: reading it after the struct died is a use after free."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def _read(self):
        owner = self._owner()
        assert owner is not None, f"{self._name} outlived its struct"
        return owner.__dict__[self._name]

    def __int__(self) -> int:
        return self._read()


@dataclass
class Failure:
    after: int  # how many calls succeed before
    code: CUresult
    raises: BaseException | None


class FakeCalls:
    """Lists the calls in order, and makes chosen ones fail. Asking for a call that is not defined here fails."""

    CUresult = CUresult

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._handles = itertools.count(0x1000, 0x10)
        self._failures: dict[str, list[Failure]] = defaultdict(list)
        self._lacking: dict[str, str] = {}

    def fail(
        self,
        call: str,
        after: int = 0,
        code: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE,
        raises: BaseException | None = None,
    ) -> None:
        """Makes a call fail once, without effect, after ``after`` more that succeed: with ``code``, or by raising."""
        assert hasattr(type(self), call), f"no call {call}"
        self._failures[call].append(Failure(after, code, raises))

    def lack(self, call: str, where: str = "driver") -> None:
        """Takes a call away from the "driver" or from the "bindings"."""
        assert where in ("driver", "bindings") and hasattr(type(self), call), (call, where)
        self._lacking[call] = where

    def have(self, call: str) -> None:
        """Undoes :meth:`lack`."""
        del self._lacking[call]

    def __getattribute__(self, name: str):
        where = object.__getattribute__(self, "_lacking").get(name) if name.startswith("cu") else None
        if where == "bindings":
            raise AttributeError(name)
        if where == "driver":

            def absent(*args):
                self.calls.append(name)
                raise RuntimeError(f'Function "{name}" not found')

            return absent
        assert not name.startswith("cu") or hasattr(type(self), name), f"no call {name}"
        return object.__getattribute__(self, name)

    def _enter(self, call: str) -> CUresult:
        self.calls.append(call)
        failures = self._failures[call]
        due = next((failure for failure in failures if failure.after <= 0), None)
        for failure in failures:
            failure.after -= 1
        if due is not None:
            failures.remove(due)
            if due.raises is not None:
                raise due.raises
            return due.code
        return CUresult.CUDA_SUCCESS

    def _answer(self, call: str, *values):
        result = self._enter(call)
        return (result, *(values if result == 0 else (None for _ in values)))


def as_int(value: int | Handle) -> int:
    assert isinstance(value, (int, Handle)), value
    return int(value)
