"""Attributes of an object of the program, with what their values depend on.

:func:`attribute_of` looks an attribute up as Python does, and adds facts on all that this reads. Methods of the program
that take part, ``__getattribute__`` and properties, run with a stand-in for the object, whose attributes are looked up
in the same way, and without the names of their module. What they return then depends on facts only.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

_CONSTANTS = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)
_REFUSED = ("IS_OP", "MATCH_")  # the identity or kind of what stands in for an object
_READING = ("get", "__contains__", "__getitem__")  # of a dictionary
_ABSENT: Any = object()
METHOD: Any = object()  # one of the object's class, which is a new object at each lookup


def is_constant(value: Any) -> bool:
    return type(value) in _CONSTANTS or (type(value) in (tuple, torch.Size) and all(map(is_constant, value)))


def entries_of(value: Any, *names: str) -> list[Any]:
    """Facts on attributes, all or these, that a finalizer may see changed before the version of their dictionary is.

    Python's quick store of an attribute frees the old value first.
    """
    kind: Any = type(value)
    own = vars(value) if kind.__setattr__ is object.__setattr__ else {}
    return [("entry", own, name, own[name]) for name in names or own if name in own and not is_constant(own[name])]


class Absent(Exception):
    """The object has no such attribute."""


class _StandIn:
    """What a method of the program sees of an object: its attributes, which ``read`` looks up, and nothing else."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[str], Any]) -> None:
        object.__setattr__(self, "_read", read)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_read")(name)

    def _refuse(self, *_: Any) -> Any:
        raise LookupError

    __setattr__ = __delattr__ = __bool__ = __eq__ = __ne__ = __hash__ = _refuse
    __str__ = __repr__ = __format__ = __dir__ = _refuse


class _Items(_StandIn):
    """What it sees of a dictionary."""

    __slots__ = ()

    def __contains__(self, key: Any) -> bool:
        return bool(self.__contains__(key))

    def __getitem__(self, key: Any) -> Any:
        return self.__getitem__(key)


def attribute_of(value: Any, name: str, steps: list[Any], *, is_generic: bool = False) -> Any:
    """An attribute of an object whose class, and the identity of whose dictionary, facts hold; or :data:`METHOD`.

    Args:
        steps: facts in the form of ``guard_facts.Step``, to which those of the lookup are added.
        is_generic: whether ``object.__getattribute__`` looks it up.

    Raises:
        Absent: there is none.
        LookupError: its value does not depend on facts alone. No facts are added.
    """
    count = len(steps)
    try:
        look = _Attributes(value, steps)
        found = look.get(name, len(look.overrides) if is_generic else 0)
        real = object.__getattribute__(value, name) if is_generic else getattr(value, name)
        is_same = real is found or (is_constant(found) and type(real) is type(found) and real == found)
        if found is not METHOD and not is_same:
            raise LookupError
    except (LookupError, AttributeError) as error:
        del steps[count:]
        raise LookupError from error
    return found


class _Attributes:
    def __init__(self, value: Any, steps: list[Any]) -> None:
        self._value, self._steps, self._hidden = value, steps, list[tuple[Any, Any]]()
        kind: Any = type(value)
        # Each one's ``super()`` has the next one.
        self.overrides = [vars(c)["__getattribute__"] for c in kind.__mro__[:-1] if "__getattribute__" in vars(c)]
        steps.append(("class", kind, None, None))

    def get(self, name: str, level: int = 0) -> Any:
        """The attribute; with ``level``, without that many overrides of ``__getattribute__``."""
        if level == len(self.overrides):
            return self._plain(name)
        return self._returned(self.overrides[level], name, level=level + 1)

    def _plain(self, name: str) -> Any:
        """As ``object.__getattribute__`` finds it, and then the ``__getattr__`` of modules."""
        of_class = next((vars(one)[name] for one in type(self._value).__mro__ if name in vars(one)), _ABSENT)
        if of_class is vars(object)["__class__"]:
            return type(self._value)
        others = getattr(type(self._value), "__getattr__", None)
        if type(of_class) is property:
            try:
                return self._returned(of_class.fget)
            except Absent:
                if others is None:
                    raise
                raise LookupError from None
        found = vars(self._value)
        if name == "__dict__":
            self._steps.append(("dict", found, None, None))
            return _StandIn({"get": lambda key, default=None: self._shown(found.get(key, default))}.__getitem__)
        if hasattr(type(of_class), "__set__") or hasattr(type(of_class), "__delete__"):
            raise LookupError
        if is_constant(found.get(name, _ABSENT)):
            self._steps.append(("item", found, name, found[name]))  # others may change
            return found[name]
        self._steps.append(("dict", found, None, None))
        if name in found:
            self._steps += entries_of(self._value, name)
            return found[name]
        if isinstance(of_class, FunctionType):
            return METHOD
        if of_class is not _ABSENT and not hasattr(type(of_class), "__get__"):
            return of_class
        is_module = isinstance(self._value, torch.nn.Module) and others is torch.nn.Module.__getattr__
        if of_class is not _ABSENT or not (others is None or (is_module and not self.overrides)):
            raise LookupError
        for part in ("_parameters", "_buffers", "_modules") if is_module else ():
            if type(found.get(part)) is not dict:
                raise LookupError
            self._steps.append(("dict", found[part], None, None))
            if name in found[part]:
                return found[part][name]
        raise Absent

    def _returned(self, method: Any, *args: Any, level: int | None = None) -> Any:
        """What a method of the program returns: one that catches no error, since one may come of a missing name."""
        if not _is_plain(method):
            raise LookupError
        code = method.__code__
        self._steps.append(("function", method, None, None))
        names: dict[str, Any] = {"__builtins__": {}}
        if level is not None:
            base = {"__getattribute__": lambda name: self._shown(self.get(name, level))}
            names["super"] = lambda *_: _StandIn(base.__getitem__)
        cells = tuple(CellType(self._shown(method)) for _ in code.co_freevars)
        own = FunctionType(code, names, None, method.__defaults__, cells)
        try:
            result = own(_StandIn(lambda name: self._shown(self.get(name))), *args)
        except Absent:
            raise
        except Exception as error:
            raise LookupError from error
        if is_constant(result):
            return result
        for shown, value in self._hidden:
            if shown is result:
                return value
        raise LookupError

    def _shown(self, value: Any) -> Any:
        """What a method sees of a value: constants and dictionaries of them; other objects have nothing to read."""
        if is_constant(value) or type(value) is _StandIn:  # an override's result is shown already
            return value
        if type(value) is dict and all(is_constant(one) for pair in value.items() for one in pair):
            self._steps.append(("dict", value, None, None))
            shown: Any = _Items({name: getattr(value, name) for name in _READING}.__getitem__)
        else:
            shown = _StandIn(dict[str, Any]().__getitem__)
        self._hidden.append((shown, value))
        return shown


def _is_plain(method: Any) -> bool:
    """Whether a method can run with stand-ins.

    It must not catch errors, since one may come of a missing name, nor ask whether two objects are the same.
    """
    if type(method) is not FunctionType or getattr(method.__code__, "co_exceptiontable", True):
        return False
    code = method.__code__
    operations = Counter(instruction.opname for instruction in dis.get_instructions(code))
    # Besides ``super()`` without arguments, nothing may use the class of the method.
    uses = sum(count for name, count in operations.items() if "DEREF" in name or "CLOSURE" in name)
    return (
        {"__class__"}.issuperset(code.co_freevars)
        and uses == operations["LOAD_SUPER_ATTR"]
        and not any(name.startswith(_REFUSED) for name in operations)
        and not any(isinstance(constant, CodeType) for constant in code.co_consts)
        and all(map(is_constant, method.__defaults__ or ()))
        and not method.__kwdefaults__
    )
