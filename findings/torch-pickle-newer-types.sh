#!/usr/bin/env bash
# PyTorch 2.13.0: tensors of the newer element types can be pickled, but not unpickled.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: pickle.dumps() of a tensor of uint16, uint32,
# uint64, float8 or complex32 succeeds, and pickle.loads() of its result raises
#   AttributeError: type object 'torch.storage.UntypedStorage' has no attribute 'dtype'
# which names neither the tensor's type nor pickle. What was written cannot be read again. torch.save()
# and torch.load() keep the same tensors, and pickle keeps bfloat16. Whatever sends objects between
# processes with pickle (MPI's lower-case calls, object collectives, remote calls) fails at the receiver.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import io
import pickle

import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
newer = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32)
for dtype in newer:
    tensor = torch.zeros(3).to(dtype)
    data = pickle.dumps(tensor)
    try:
        pickle.loads(data)
    except AttributeError as error:
        seen = str(error)
    else:
        raise SystemExit(f"changed: pickle keeps {dtype}")
    print(f"{dtype}: pickle.loads raises AttributeError: {seen}")
    assert seen == "type object 'torch.storage.UntypedStorage' has no attribute 'dtype'", seen
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.load(file, weights_only=True).dtype == dtype
assert pickle.loads(pickle.dumps(torch.zeros(3).bfloat16())).dtype == torch.bfloat16
print("torch.save keeps all of them; pickle keeps bfloat16")
PYTHON
