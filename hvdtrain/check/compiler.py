"""What `hvdtrain check` reports on the C++ compiler, and on what is compiled at run time."""

from __future__ import annotations

import importlib.util
import os
import shlex

from hvdtrain.check.section import Section
from hvdtrain.compiled.compiler import find_compiler
from hvdtrain.errors import UsageError

# The framework that each is for, or "".
_NEEDED_BY = (
    ("torch", "the allocator of PyTorch's gradients, which are else copied into buckets"),
    ("tensorflow", "the allocator of TensorFlow's gradients, which are else copied into buckets"),
    ("torch", "train --compile inductor"),
    ("", "build-horovod"),
)


def check_compiler() -> Section:
    """Report which compiler there is and what needs one; training itself does not."""
    needed_by = [
        what for module, what in _NEEDED_BY if not module or importlib.util.find_spec(module)
    ]
    facts: dict[str, object] = {"command": None, "needed_by": needed_by}
    try:
        facts["command"] = line = shlex.join(find_compiler(os.environ))
    except UsageError as error:
        line = str(error)
    return Section("compiler", facts, (line, *(f"needs a compiler: {what}" for what in needed_by)))
