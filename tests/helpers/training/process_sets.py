"""What each function says to a list of ranks where it takes a process set."""

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def assert_lists_are_refused(module: ModuleType, arguments: Mapping[str, Any], least: int) -> None:
    """Fail unless every public function with a `process_set` refuses [0], and says what to pass."""
    answers = {
        name: _answer(getattr(module, name), {**arguments, **arguments.get(name, {})})
        for name in module.__all__
        if name not in ("add_process_set", "ProcessSet") and _takes_a_set(getattr(module, name))
    }
    refused = [
        name for name, text in answers.items() if "[0] is not a ProcessSet: register" in text
    ]
    assert len(refused) >= least, answers
    assert set(refused) == set(answers), {n: t for n, t in answers.items() if n not in refused}


def _takes_a_set(function: Any) -> bool:
    return callable(function) and "process_set" in _parameters(function)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # of a class written in C
        return {}


def _answer(function: Any, arguments: Mapping[str, Any]) -> str:
    required = {
        name: arguments[name]
        for name, parameter in _parameters(function).items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name != "process_set"
    }
    try:
        function(**required, process_set=[0])
    except TypeError as error:
        return str(error)
    except Exception as error:
        return repr(error)
    return "nothing"
