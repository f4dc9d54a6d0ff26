#!/usr/bin/env bash
# Flax 0.12.8, webdataset 1.0.2, TensorStore 0.1.86: arrays in the other byte order come back with scrambled numbers.
#
# Seen with flax 0.12.8, webdataset 1.0.2, tensorstore 0.1.86, numpy 2.4.6, Python 3.11, on little-endian machines: numpy
# keeps the byte order of what it reads, and MNIST's files, FITS and netCDF 3 are
# big-endian; sums and comparisons do not show it. Flax's msgpack_serialize, the .ten entries of webdataset and
# tensorstore.array take the array's bytes, but not their order: 1.0 is read back as 4.6e-41, and the
# int32 1 as 16777216, without a warning. A scaler's means or labels in a checkpoint, and samples in shards, are
# such arrays. webdataset's .npy entries, and TensorStore's write of the array itself, keep the numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet flax==0.12.8 jax==0.10.2 webdataset==1.0.2 tensorstore==0.1.86 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import sys

import numpy as np
import tensorstore
import webdataset
from flax import serialization

shard = sys.argv[1]


def flax(array):
    return serialization.msgpack_restore(serialization.msgpack_serialize({"a": array}))["a"]


def through_shard(array):
    with webdataset.TarWriter(shard) as writer:
        writer.write({"__key__": "0", "a.ten": [array], "b.npy": array})
    (sample,) = webdataset.WebDataset(shard, shardshuffle=False).decode()
    return sample


def ten(array):
    return through_shard(array)["a.ten"][0]


def npy(array):
    return through_shard(array)["b.npy"]


def wrapped(array):
    return tensorstore.array(array).read().result()


def written(array):
    store = tensorstore.open({"driver": "zarr", "kvstore": "memory://"}, create=True, dtype=array.dtype.name, shape=array.shape)
    store.result().write(array).result()
    return store.result().read().result()


for dtype in ("f4", "i4"):
    native = np.array([1, 2, 300], dtype)
    big = native.astype(">" + dtype)
    assert np.array_equal(native, big)
    scrambled = np.frombuffer(big.tobytes(), "<" + dtype)  # what reading the bytes in the wrong order gives
    for function, keeps in ((flax, False), (ten, False), (wrapped, False), (npy, True), (written, True)):
        assert np.array_equal(function(native), native), f"changed: {function.__name__} of the native order"
        seen = np.asarray(function(big))
        print(f"{function.__name__}: {big.dtype.str} {big.tolist()} comes back as {seen.tolist()}")
        assert np.array_equal(seen, native if keeps else scrambled), f"changed: {function.__name__}"
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/script.py" "$folder/shard.tar"
