"""Runs a function right after a module is imported for the first time.

:class:`ImportHook` is a finder of the import system. It lets the other finders find the module, changes nothing else
about it, and calls the function in the importing thread, or at once if the module is already loaded.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook(importlib.abc.MetaPathFinder):
    """Watches for modules until :meth:`stop`."""

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], None]] = {}

    def watch(self, actions: Mapping[str, Callable[[], None]]) -> None:
        """Runs each action once its module, the key, is loaded; for loaded ones now, in the given order."""
        self._waiting.update(actions)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in actions:
            if name in sys.modules:
                importlib.import_module(name)  # waits if another thread is importing it
            if is_loaded(name):
                self._run(name)

    def waits_for(self, name: str) -> bool:
        return name in self._waiting

    def stop(self) -> None:
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)  # the import system passes over finders without it
            found = None if finder is self or find_spec is None else find_spec(fullname, path, target)
            if found is not None:
                if found.loader is not None:
                    found.loader = _Loader(found.loader, lambda: self._run(fullname))
                return found
        return None

    def _run(self, name: str) -> None:
        if (action := self._waiting.pop(name, None)) is None:
            return
        try:
            action()
        except Exception:
            raise
        except BaseException:  # an interrupt makes the import fail; the next import tries again
            self._waiting[name] = action
            raise
        finally:
            if not self._waiting:
                self.stop()


class _Loader(importlib.abc.Loader):
    """A module's own loader, and a function that runs after it."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action()


def is_loaded(name: str) -> bool:
    """Whether a module has been executed to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
