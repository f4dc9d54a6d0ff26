"""Buffers over numpy's and torch's memory, and the arithmetic on them."""

import numpy as np
import pytest
import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core.allreduce import _divide_bits
from hvdtrain.types import DType


def test_views_share_memory() -> None:
    array = np.arange(10, dtype=np.int32)
    part = Buffer.from_array(array).slice(2, 3)
    part.array()[:] = -1
    assert array.tolist() == [0, 1, -1, -1, -1, 5, 6, 7, 8, 9]
    assert (part.count, part.nbytes, part.dtype) == (3, 12, DType.INT32)
    assert Buffer.from_array(array[:0]).array().size == 0
    with pytest.raises(ValueError, match="outside a buffer of 3"):
        part.slice(1, 3)
    with pytest.raises(ValueError, match="C-contiguous"):
        Buffer.from_array(array[::2])


def test_views_of_a_tensor_are_tensors() -> None:
    tensor = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    buffer = Buffer.of(tensor)
    assert (buffer.pointer, buffer.device, buffer.count) == (tensor.data_ptr(), "cpu", 12)
    part = buffer.slice(2, 3)
    elements = part.elements()
    assert isinstance(elements, torch.Tensor)
    elements.fill_(-1)
    assert tensor.flatten().tolist() == [0, 1, -1, -1, -1, 5, 6, 7, 8, 9, 10, 11]
    assert part.pointer == elements.data_ptr()
    assert part.array().tolist() == [-1, -1, -1]
    assert len(buffer.slice(12, 0).elements()) == 0
    with pytest.raises(ValueError, match="contiguous memory, got strides"):
        Buffer.of(tensor.t())


def test_what_is_no_element_type() -> None:
    for elements in (np.zeros(2, "datetime64[s]"), torch.zeros(2, dtype=torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match="cannot be communicated"):
            Buffer.of(elements)
    with pytest.raises(ValueError, match="7 bytes are not a multiple of the size of int32"):
        Buffer.of(np.zeros(7, np.uint8)).view(DType.INT32)


def test_a_tensor_of_inference_is_written_like_any_other() -> None:
    with torch.inference_mode():
        tensor, on_device = torch.ones(3), torch.ones(3, device="meta")
    Buffer.of(tensor).scale(3.0)
    assert tensor.tolist() == [3.0, 3.0, 3.0]
    other = Buffer.of(on_device).like(3)
    for buffer in (Buffer.of(on_device), other):
        buffer.scale(3.0)
        buffer.zero()
    Buffer.of(on_device).copy_from(other)


def test_memory_without_addresses() -> None:
    """The device "meta" has none, and no elements either: nothing may look at them."""
    buffer = Buffer.of(torch.zeros(2, 3, device="meta"))
    assert (buffer.device, buffer.pointer, buffer.count) == ("meta", 0, 6)
    part = buffer.slice(1, 2)
    assert (part.device, part.pointer, part.count) == ("meta", 0, 2)
    assert (part.like(3).device, part.view(DType.UINT8).count) == ("meta", 8)
    for view in (buffer, part):
        view.zero()
        view.scale(2.0)
        view.copy_from(view.like(view.count))
        with pytest.raises(ValueError, match="numpy cannot access memory on meta"):
            view.array()
        with pytest.raises(ValueError, match="memory on meta is not the host's"):
            view.host()
    with pytest.raises(ValueError, match="cannot be copied to"):
        buffer.copy_from(Buffer.of(torch.zeros(2)))


def test_scale() -> None:
    floats, integers = np.array([1.0, 3.0]), np.array([3, -3])
    Buffer.from_array(floats).scale(0.5)
    Buffer.from_array(integers).scale(0.5)
    assert floats.tolist() == [0.5, 1.5]
    assert integers.tolist() == [1, -1]
    for elements in (np.array([True]), torch.tensor([True])):
        with pytest.raises(ValueError, match="cannot be applied to bool"):
            Buffer.of(elements).scale(0.5)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64", "float32", "float64"])
def test_tensors_are_scaled_as_arrays_are(dtype: str) -> None:
    array = np.array([1, 2, 3, 100, 113], dtype)
    tensor = torch.from_numpy(array.copy())
    Buffer.of(tensor).scale(0.7)
    Buffer.of(array).scale(0.7)
    assert tensor.numpy().tobytes() == array.tobytes()


def test_integers_without_a_sign_are_divided_on_devices() -> None:
    array = np.array([0, 7, 2**63 + 1, 2**64 - 1], np.uint64)
    expected = array // np.uint64(3)
    _divide_bits(torch.from_numpy(array).view(torch.int64), 3)
    assert array.tolist() == expected.tolist()
