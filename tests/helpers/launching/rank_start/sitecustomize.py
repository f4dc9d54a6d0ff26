"""Has ranks start sooner: of torch and Keras they import what they use; see job.py.

- Two modules of torch run once something of them is used: torch._dynamo, which an optimizer
  imports, and torch._meta_registrations, which what compiles or exports needs (two seconds).
- Keras and TensorFlow find no packages beside them, and Keras finds no TensorFlow on its other
  backends, while they are imported: they do without, as where these are not (four seconds).
- Imports leave no garbage: to look for it as often as Python does takes a fifth of TensorFlow's.
"""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_REGISTRATIONS = "torch._meta_registrations"
_DEFERRED = {_REGISTRATIONS, _DYNAMO}
_BESIDE_KERAS = {"jax", "matplotlib", "pandas", "sklearn"}


class _Deferred(ModuleType):
    """A module until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        _run(self)
        return getattr(self, name)


class _DeferredDynamo(_Deferred):
    """What optimizers use of it does nothing while nothing is compiled."""

    def graph_break(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def disable(
        self, function: Callable[..., Any] | None = None, *args: Any, **named: Any
    ) -> Callable[..., Any]:
        if function is None:  # @disable(), as Keras writes it
            return lambda given: self.disable(given, *args, **named)

        def call(*own_args: Any, **own_named: Any) -> Any:
            if type(self) is _DeferredDynamo:
                return function(*own_args, **own_named)
            return self.disable(function, *args, **named)(*own_args, **own_named)

        # Tracebacks show it as what is no script.
        call.__code__ = call.__code__.replace(co_filename="<frozen torch>")
        return call


def _run(module: Any) -> None:
    if type(module) is ModuleType:  # it has run
        return
    module.__class__ = ModuleType
    if module.__name__ == _DYNAMO:
        module.__path__ = module.__spec__.submodule_search_locations
        _run(sys.modules[_REGISTRATIONS])
    module.__spec__.loader.run(module)


def _defer(module: ModuleType) -> None:
    if module.__name__ == _DYNAMO:
        del module.__path__  # so that to import a submodule runs this one first
        module.__class__ = _DeferredDynamo
    else:
        module.__class__ = _Deferred
        _let_generators_be_made()


def _let_generators_be_made() -> None:
    # As torch._prims.rng_prims does, which _meta_registrations imports.
    from torch._C import _set_generator_metaclass

    try:
        base: Any = import_module("torch._custom_class_base").CustomClassBaseMeta
    except ImportError:  # until torch 2.14
        base = import_module("torch._opaque_base").OpaqueBaseMeta
    _set_generator_metaclass(base)


def _is_importing(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _BESIDE_KERAS - {os.environ.get("KERAS_BACKEND")} and (
            _is_importing("keras") or _is_importing("tensorflow")
        ):
            raise ModuleNotFoundError(f"a rank of the tests imports no {fullname} for Keras")
        if fullname not in _DEFERRED:
            return None
        _DEFERRED.remove(fullname)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None:
            loader: Any = spec.loader
            loader.run, loader.exec_module = loader.exec_module, _defer
        return spec


if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]
sys.meta_path.insert(0, _Finder())
gc.set_threshold(50_000, 20, 20)
