"""A script or module: what it imports, what Accelerate would tell it, and what runs it."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import sys
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from hvdtrain.errors import UsageError

# Subcommands that ranks run.
OF_RANKS = ("train", "evaluate", "predict", "script", "sweep")


def is_script(arguments: Sequence[str]) -> bool:
    """Return whether the first argument is a script: an existing file, or a name with .py."""
    word = arguments[0] if arguments else ""
    return word.endswith(".py") or (word not in OF_RANKS and os.path.isfile(word))


def require_program(arguments: Sequence[str]) -> None:
    """Check that ranks can run these arguments."""
    word = arguments[0] if arguments else "train"
    words = list(arguments)
    if words and not is_script(words) and Path(words[0]).name.startswith("python"):
        python = words.pop(0)
        if words[:1] not in (["-m"], ["-c"]):
            raise UsageError(
                f"ranks run Python already: leave out '{python}', and begin with the script"
            )
    if words[:2] == ["-m", "hvdtrain"]:
        instead = " ".join(words[2:] or ["train"])
        raise UsageError(f"ranks run 'python -m hvdtrain' already: write -- {instead}")
    if words[:1] == ["-m"]:
        raise UsageError("ranks cannot run a module by name: write -- and the path of its file")
    if words[:1] == ["-c"]:
        raise UsageError(
            "ranks cannot run code from the command line: put it into a file and write -- FILE"
        )
    if word.startswith("-") or word in OF_RANKS or is_script(arguments):
        return
    raise UsageError(
        f"'{word}' cannot be run by ranks: name a script, or one of {', '.join(OF_RANKS)}"
    )


def rank_words(arguments: Sequence[str], as_horovod: bool = False) -> list[str]:
    """Return the subcommand and the arguments with which each rank runs a program."""
    script = ["script", *(["--as-horovod"] if as_horovod else [])]
    return [*(script if is_script(arguments) else []), *arguments]


def interpreter_options() -> list[str]:
    """Return the options between `python` and `-m hvdtrain`, or the installed command."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    return options[:-2] if options[-2:-1] == ["-m"] else options[:-1]


# transformers' Trainer is built on Accelerate.
_ACCELERATE = {"accelerate", "transformers"}
# Modules that join no other processes by themselves: a script that joins others with them contains
# one of the words below.
_OF_ONE_PROCESS = sys.stdlib_module_names | {
    *("PIL", "cv2", "datasets", "flax", "h5py", "jax", "keras", "matplotlib", "numpy", "optax"),
    *("pandas", "scipy", "sklearn", "tensorboard", "tensorflow", "tensorflow_datasets"),
    *("tokenizers", "torch", "torchtext", "torchvision", "tqdm", "yaml"),
}
_WORDS_OF_RANKS = re.compile(
    r"distributed|distribution\b|MultiWorkerMirrored|ParameterServerStrategy|ClusterResolver"
    r"|rank|world_size|TF_CONFIG|SLURM_|PMI_|subprocess|^\s*from\s+\.",
    re.IGNORECASE | re.MULTILINE,
)
_WATCH = ("-m", "hvdtrain.launch.scripts.watched")


@dataclass(frozen=True)
class Script:
    """What a rank runs."""

    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Script:
        """Return the script of a command line."""
        if not words:
            raise UsageError("which script? Name one, or a module with -m, or pass --print")
        count = 2 if words[0] == "-m" else 1
        if len(words) < count:
            raise UsageError("which module? Name it after -m")
        if count == 1 and not Path(words[0]).is_file():
            raise UsageError(f"there is no file {words[0]}: name an existing script")
        return cls(tuple(words[:count]), tuple(words[count:]))

    def uses_accelerate(self) -> bool:
        """Return whether its own text imports Accelerate, or transformers, whose Trainer does."""
        return not _ACCELERATE.isdisjoint(_imported(self._text()))

    def ignores_ranks(self) -> bool:
        """Return whether neither its text nor that of modules beside it has to do with ranks.

        If it imports a package that may join other processes by itself, the answer is no.
        """
        path = self._file()
        texts, seen = [self._text()], set(_OF_ONE_PROCESS)
        if path is None or not texts[0]:
            return False
        for text in texts:
            if _WORDS_OF_RANKS.search(text):
                return False
            for name in _imported(text) - seen:
                seen.add(name)
                file = path.parent / f"{name}.py"
                files = [file] if file.is_file() else sorted((path.parent / name).rglob("*.py"))
                if not files:  # an installed package
                    return False
                texts += map(_read, files)
        return True

    def command(self, local_rank: str | None = None, watched: bool = False) -> list[str]:
        """Return the command line, with the options of this process's interpreter."""
        watch = _WATCH if watched else ()
        first = [] if local_rank is None else [local_rank]
        options = interpreter_options()
        return [sys.executable, *options, *watch, *self.program, *first, *self.arguments]

    def _text(self) -> str:
        path = self._file()
        return "" if path is None else _read(path)

    def _file(self) -> Path | None:
        """Return the file of the program, if it is found without importing a package."""
        if self.program[0] != "-m":
            return Path(self.program[0])
        for folder in sys.path:
            module = Path(folder, *self.program[1].split("."))
            for path in (module.with_name(f"{module.name}.py"), module / "__main__.py"):
                if path.is_file():
                    return path
        return None


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # as Python decodes it
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):  # the script's own matter
        return ""


def _imported(text: str) -> set[str]:
    """Return the top-level modules that a text imports; none if it is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
    ]
    return {name.partition(".")[0] for name in names}


USE_CPU, MIXED_PRECISION = "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"

# Names in /dev of what torch may be built for, by names in torch.version.
_DEVICES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("nvidia[0-9]*", "dxg"),
    "hip": ("kfd",),
    "xpu": ("dri/renderD*",),
}
# Settings that are followed, or that MPI's launcher decides.
_FOLLOWED = {"mixed_precision", "num_processes", "use_cpu"}
_OF_THE_LAUNCHER = {
    *("compute_environment", "debug", "distributed_type", "enable_cpu_affinity", "gpu_ids"),
    *("machine_rank", "main_process_ip", "main_process_port", "main_training_function"),
    *("mpirun_config", "num_machines", "rdzv_backend", "same_network"),
}
_PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU")


@dataclass(frozen=True)
class Settings:
    """What matters here in a file that `accelerate config` has written."""

    source: Path
    num_processes: int | None = None
    use_cpu: bool = False
    mixed_precision: str | None = None
    others: tuple[str, ...] = ()


def default_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that `accelerate config` writes without a name, if it is there."""
    # A user without a name may have no home.
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(environ.get("HF_HOME") or Path(cache) / "huggingface")
    path = folder / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def read_file(path: Path) -> Settings:
    """Return the settings in a file."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise UsageError(f"to read {path}, PyYAML is needed: pip install pyyaml") from None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected the lines KEY: VALUE that `accelerate config` writes")
    count, precision = found.get("num_processes"), found.get("mixed_precision")
    if count == -1:  # Accelerate's own default
        count = None
    if count is not None and (not isinstance(count, int) or count < 1):
        raise UsageError(f"{path}: num_processes: {count!r} must be an integer of at least 1")
    # `downcast_bf16: 'no'` is in every file. An unquoted `no` or `NO` is a boolean of YAML.
    given = {key: value for key, value in found.items() if value and value != "no"}
    others = [str(key) for key in given if key not in _FOLLOWED | _OF_THE_LAUNCHER]
    kind = given.get("distributed_type", "NO")
    if kind not in _PLAIN_TYPES:
        others.insert(0, f"distributed_type: {kind}")
    return Settings(
        source=path,
        num_processes=count,
        use_cpu=found.get("use_cpu") is True,
        mixed_precision="no" if precision is False else precision and str(precision),
        others=tuple(others),
    )


def has_gpu(environ: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Return whether this host has a GPU that the installed torch can use.

    torch is not imported, which takes seconds: what it is built for is read from its version.
    """
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    spec = PathFinder.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if version is None or not version.is_file():
        return False
    built = runpy.run_path(str(version))
    return any(
        any(devices.glob(pattern))
        for name, patterns in _DEVICES.items()
        if built.get(name)
        for pattern in patterns
    )


def accelerate_variables(settings: Settings | None, gpu: bool) -> dict[str, str]:
    """Return the variables in which Accelerate looks for its settings.

    Without a GPU it takes part in no world unless it is told to use the CPU.
    """
    variables = {}
    if not gpu or (settings is not None and settings.use_cpu):
        variables[USE_CPU] = "true"
    if settings is not None and settings.mixed_precision is not None:
        variables[MIXED_PRECISION] = settings.mixed_precision
    return variables


def remarks(settings: Settings, size: int, gpu: bool) -> list[str]:
    """Return in which points a file is not followed."""
    found = []
    asked = settings.num_processes
    if asked is not None and asked != size:
        found.append(
            f"{settings.source}: num_processes: {asked}, but there are {size} ranks: mpirun's -np "
            "decides"
        )
    if not gpu and not settings.use_cpu:
        found.append(f"{settings.source}: use_cpu: false, but there is no GPU: ranks use the CPU")
    if not gpu and settings.mixed_precision == "fp16":
        found.append(
            f"{settings.source}: mixed_precision: fp16 needs a GPU: write bf16 or no for the CPU"
        )
    if settings.others:
        found.append(
            f"{settings.source}: {', '.join(settings.others)}: not passed on: give Accelerator() "
            "these settings in the script, or use accelerate launch"
        )
    return found
