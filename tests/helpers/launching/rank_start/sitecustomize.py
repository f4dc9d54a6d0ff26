"""Has ranks run torch._dynamo once something is compiled, and not for the first optimizer.

Running it takes each rank 1.5 s of a core. An optimizer uses two of its functions, which do nothing
while nothing is compiled. Python imports this module at its start; see job.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _Deferred(ModuleType):
    """The module until something else of it is used."""

    def graph_break(self) -> None:
        pass

    def disable(
        self, function: Callable[..., Any] | None = None, *args: Any, **named: Any
    ) -> Callable[..., Any]:
        if function is None:  # @disable(), as Keras writes it
            return lambda given: self.disable(given, *args, **named)

        def call(*own_args: Any, **own_named: Any) -> Any:
            if type(self) is _Deferred:
                return function(*own_args, **own_named)
            return self.disable(function, *args, **named)(*own_args, **own_named)

        return call

    def __getattr__(self, name: str) -> Any:
        if type(self) is _Deferred:
            module: Any = self
            module.__class__ = ModuleType
            module.__path__ = module.__spec__.submodule_search_locations
            module.__spec__.loader.run(module)
        return getattr(self, name)


def _defer(module: ModuleType) -> None:
    del module.__path__  # so that to import a submodule runs this one first
    module.__class__ = _Deferred


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None:
            loader: Any = spec.loader
            loader.run, loader.exec_module = loader.exec_module, _defer
        return spec


sys.meta_path.insert(0, _Finder())
