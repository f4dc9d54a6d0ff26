"""Variables that make no sense are refused by name."""

import re

import pytest
from paths import ROOT

from hvdtrain.config import Config
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.devices import (
    Device,
    DeviceWish,
    device_index,
    no_gpus,
    parse_gpu_map,
    require_own_devices,
)
from hvdtrain.errors import UsageError, require_version
from hvdtrain.topology import Topology
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
    assert getattr(Config.from_environ({f"HVDTRAIN_{name}": "2.5"}), name.lower()) == 2.5


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


@pytest.mark.parametrize(
    ("oldest", "found"),
    [
        ("2.4", ["2.4.0", "2.13.0+cpu", "3.0.0a0+git12"]),
        ("0.6.1", ["0.6.1", "0.10.2", "0.9.0.1", "1.0.0rc1", "0.7"]),
        ("3", ["3.0.0", "3.15.1", "10"]),
    ],
)
def test_versions_that_will_do(oldest: str, found: list[str]) -> None:
    for version in found:
        require_version("hvdtrain.any needs Any", "any", version, oldest)


@pytest.mark.parametrize(
    ("oldest", "found"), [("2.4", "2.3.1+cpu"), ("0.6.1", "0.6.0"), ("0.6.1", "0.6"), ("3", "2.15")]
)
def test_versions_that_are_too_old(oldest: str, found: str) -> None:
    line = f"hvdtrain.torch needs PyTorch >= {oldest}, found {found}: pip install 'torch>={oldest}'"
    with pytest.raises(UsageError, match=f"^{re.escape(line)}$"):
        require_version("hvdtrain.torch needs PyTorch", "torch", found, oldest)


def test_no_version_is_refused_that_setup_claims() -> None:
    setup, found = (ROOT / "setup.py").read_text(), []
    for path in (ROOT / "hvdtrain").glob("*/__init__.py"):
        found += re.findall(r'require_version\(".*", "(.*)", .*, "(.*)"\)', path.read_text())
    assert sorted(package for package, _ in found) == ["jax", "keras", "tensorflow", "torch"]
    for package, oldest in found:
        claimed = re.findall(rf'"{package}(?:-cpu)?>=([\d.]+)"', setup)
        assert claimed
        for version in claimed:
            require_version("needs", package, version, oldest)


def places(*nodes: int) -> list[Topology]:
    hosts = [f"host{node}" for node in nodes]
    return [Topology.from_nodes(rank, nodes, hosts) for rank in range(len(nodes))]


@pytest.mark.parametrize(
    ("visible", "wish", "indices"),
    [
        (4, DeviceWish(), [0, 1, 2, 0]),
        (3, DeviceWish(), [0, 1, 2, 0]),
        (1, DeviceWish(), [0, 0, 0, 0]),  # the scheduler has given each rank its own
        (4, DeviceWish(gpu_map=(3, 2, 1, 0)), [3, 2, 1, 3]),
        (2, DeviceWish(share=True), [0, 1, 0, 0]),
        (4, DeviceWish(share=True), [0, 1, 2, 0]),
        (2, DeviceWish(gpu_map=(1, 1, 0), share=True), [1, 1, 0, 1]),
    ],
)
def test_indices(visible: int, wish: DeviceWish, indices: list[int]) -> None:
    assert [device_index(place, visible, wish) for place in places(0, 0, 0, 1)] == indices


@pytest.mark.parametrize(
    ("visible", "wish", "message"),
    [
        (2, DeviceWish(), "3 ranks on host0 but 2 GPUs: start one rank for each GPU, or use --sh"),
        (4, DeviceWish(gpu_map=(0, 1)), "--gpu-map names 2 GPUs, but host0 has 3 ranks"),
        (2, DeviceWish(gpu_map=(0, 1, 2)), "gives local rank 2 GPU 2, but host0 has 2 here"),
    ],
)
def test_what_cannot_be(visible: int, wish: DeviceWish, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        device_index(places(0, 0, 0, 1)[2], visible, wish)


def test_masks_that_hide_all_gpus() -> None:
    assert "torch sees no GPU here: use --device cpu" in str(no_gpus("torch", {"PATH": "/bin"}))
    masks = {"ROCR_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3", "ZE_AFFINITY_MASK": ""}
    said = (
        "JAX sees no GPU here (CUDA_VISIBLE_DEVICES=3, ROCR_VISIBLE_DEVICES=3, ZE_AFFINITY_MASK=)"
    )
    assert said in str(no_gpus("JAX", masks))


def test_maps() -> None:
    assert parse_gpu_map(None) == ()
    assert parse_gpu_map("3, 2,1,0") == (3, 2, 1, 0)
    for text in ("", "0,,1", "-1", "a", "0;1", "\u00b2", "9" * 5000):
        with pytest.raises(UsageError, match="give a GPU's index for each local rank"):
            parse_gpu_map(text)


def test_ranks_with_the_same_gpu() -> None:
    require_own_devices([Device("cpu (1 thread)")] * 4)
    own = [Device("cuda:0 (H)", f"GPU-{number}") for number in range(3)]
    require_own_devices(own)
    # Each sees one GPU, which it calls 0, and a mask that went wrong gave two of them the same.
    with pytest.raises(UsageError, match=r"ranks 1 and 3 have the same GPU, cuda:0 \(H\), GPU-1:"):
        require_own_devices([*own, own[1]])
