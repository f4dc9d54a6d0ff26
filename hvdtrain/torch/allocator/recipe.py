"""How the allocator is compiled against the headers of the installed PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch

from hvdtrain.core.allocators.build import Recipe


def recipe() -> Recipe:
    """Return how the allocator is compiled."""
    abi = int(torch.compiled_with_cxx11_abi())
    beside = Path(torch.__file__).parent
    return Recipe(
        source=Path(__file__).with_name("gradient_allocator.cpp"),
        name=f"torch{torch.__version__}",
        build=f"{torch.version.git_version} {abi}",
        flags=[
            *("-std=gnu++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
            # PyTorch has loaded these libraries, wherever they are.
            *("-isystem", str(beside / "include"), "-L", str(beside / "lib")),
        ],
        libraries=["-lc10", "-ltorch_cpu"],
    )
