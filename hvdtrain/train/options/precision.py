"""Options for the types and the compilation of arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.train.options.checks import not_empty
from hvdtrain.train.options.declare import OptionGroup, option

DTYPES = ("float32", "float64")
PRECISIONS = ("none", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(OptionGroup):
    """Options for the types and the compilation of arithmetic."""

    title = "Precision"

    dtype: str = option("float32", "Data type of weights and arithmetic.", choices=DTYPES)
    amp: str = option(
        "none", "Mixed precision: the data type of matrix products.", choices=PRECISIONS
    )
    compile: str | None = option(
        None,
        "Compile the model with this backend of torch.compile, such as inductor.",
        metavar="BACKEND",
        check=not_empty,
    )

    def check(self) -> None:
        """Check that the options of this group go together."""
        if self.amp != "none" and self.dtype != "float32":
            raise UsageError(f"--amp {self.amp} goes with --dtype float32 only, got {self.dtype}")
