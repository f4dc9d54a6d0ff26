"""Variables that make no sense are refused by name."""

from __future__ import annotations

import pytest

from hvdtrain.config import Config
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.errors import UsageError
from hvdtrain.types import DType

SIZES = ("BUCKET_BYTES", "FIRST_BUCKET_BYTES", "CHUNK_BYTES")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1e6", "many"])
def test_sizes_are_positive_numbers(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"HVDTRAIN_{name}='{text}' .*positive"):
        Config.from_environ({f"HVDTRAIN_{name}": text})


def test_a_chunk_fits_into_the_count_of_every_mpi() -> None:
    assert Config.from_environ({"HVDTRAIN_CHUNK_BYTES": "2147483647"}).chunk_bytes == 2**31 - 1
    with pytest.raises(UsageError, match=r"HVDTRAIN_CHUNK_BYTES='2147483648' .*at most 2147483647"):
        Config.from_environ({"HVDTRAIN_CHUNK_BYTES": "2147483648"})
    assert Config.from_environ({"HVDTRAIN_BUCKET_BYTES": "2147483648"}).bucket_bytes == 2**31


def test_defaults() -> None:
    assert Config.from_environ({}) == Config()


@pytest.mark.parametrize(("text", "bucket_bytes"), [("67108864", 64 << 20), ("1000", 1000)])
def test_horovods_fusion_threshold_is_the_size_of_a_bucket(text: str, bucket_bytes: int) -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": text}
    config = Config.from_environ(environ)
    assert config.bucket_bytes == bucket_bytes
    assert config.first_bucket_bytes == min(1 << 20, bucket_bytes)
    both = Config.from_environ(environ | {"HVDTRAIN_BUCKET_BYTES": "5000"})
    assert (both.bucket_bytes, both.first_bucket_bytes) == (5000, 5000)


def test_no_fusion_is_a_bucket_for_each_gradient() -> None:
    config = Config.from_environ({"HOROVOD_FUSION_THRESHOLD": "0"})
    specs = [ParameterSpec(name, (1,), (1,), DType.INT8, "int8", "cpu") for name in "abc"]
    assert config.bucket_bytes == 1
    plan = make_plan(specs, config.bucket_bytes, config.first_bucket_bytes)
    assert [bucket.parameters for bucket in plan.buckets] == [(2,), (1,), (0,)]


@pytest.mark.parametrize("text", ["", "-1", "64MB", "1e6", "0x10", " 5", "many"])
def test_nonsense_in_horovods_variables_counts_as_not_set(text: str) -> None:
    names = ("FUSION_THRESHOLD", "CYCLE_TIME", "LOG_LEVEL", "CACHE_CAPACITY")
    assert Config.from_environ({f"HOROVOD_{name}": text for name in names}) == Config()


@pytest.mark.parametrize("name", ["STALL_SECONDS", "STALL_SHUTDOWN_SECONDS"])
@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "soon"])
def test_stall_times_are_numbers_of_seconds(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"HVDTRAIN_{name}='{text}' .*number of seconds"):
        Config.from_environ({f"HVDTRAIN_{name}": text})
    config = Config.from_environ({f"HVDTRAIN_{name}": "2.5"})
    assert getattr(config, name.lower()) == 2.5


@pytest.mark.parametrize("name", ["STALL_STACKS", "ABORT_ON_THREAD_EXCEPTION", "HALVES_IN_FLOAT32"])
def test_switches_are_on_or_off(name: str) -> None:
    variable = f"HVDTRAIN_{name}"
    for text, expected in {"0": False, "1": True}.items():
        assert getattr(Config.from_environ({variable: text}), name.lower()) == expected
    with pytest.raises(UsageError, match=f"{variable}='yes' must be 0 or 1"):
        Config.from_environ({variable: "yes"})


def test_horovods_stall_variables_count_where_ours_are_not_set() -> None:
    horovods = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
    }
    config = Config.from_environ(horovods)
    assert (config.stall_seconds, config.stall_shutdown_seconds) == (30, 90)
    assert Config.from_environ(horovods | {"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_seconds == 0
    ours = {"HVDTRAIN_STALL_SECONDS": "7", "HVDTRAIN_STALL_SHUTDOWN_SECONDS": "0"}
    config = Config.from_environ(horovods | {"HOROVOD_STALL_CHECK_DISABLE": "1"} | ours)
    assert (config.stall_seconds, config.stall_shutdown_seconds) == (7, 0)


@pytest.mark.parametrize("text", ["", "0", "-5", "nan", "inf", "often", "1e999"])
def test_an_odd_variable_of_horovods_is_ignored(text: str) -> None:
    names = ("STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", "STALL_CHECK_DISABLE")
    odd = {f"HOROVOD_{name}": text for name in (*names, "SOMETHING_NEW")}
    assert Config.from_environ(odd) == Config()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("HVDTRAIN_STALL_SECOND", "HVDTRAIN_STALL_SECONDS"),
        ("HVDTRAIN_ENGIN", "HVDTRAIN_ENGINE"),
        ("HVDTRAIN_TIME_LINE", "HVDTRAIN_TIMELINE"),
        ("hvdtrain_engine", "HVDTRAIN_ENGINE"),
    ],
)
def test_a_misspelt_name_is_refused(written: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"^{written} has no effect: did you mean {meant}\\?$"):
        Config.from_environ({written: "1"})


def test_other_names_are_left_alone() -> None:
    names = ("TEST_JOB", "LEDGER", "CALL_KEY", "MY_FOLDER", "DETERMINISTIC_OPS", "ENGINE_2")
    assert Config.from_environ({f"HVDTRAIN_{name}": "1" for name in names}) == Config()
