#!/usr/bin/env bash
# PyTorch 2.13.0: a module with a buffer in a compressed sparse layout cannot be deep-copied.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: copy.deepcopy() of a CSR, CSC, BSR or BSC tensor,
# and of any module that has one as a buffer, raises
#   NotImplementedError: Cannot access storage of SparseCsrTensorImpl
# although clone(), pickle and torch.save() take the same tensors, and deepcopy takes COO. So averaged
# copies of a model (torch.optim.swa_utils.AveragedModel) fail for a layer with a fixed sparse graph.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import copy
import io
import pickle

import torch
from torch.optim.swa_utils import AveragedModel

assert torch.__version__.startswith("2.13.0"), torch.__version__
eye = torch.eye(4)
layouts = {
    "CSR": eye.to_sparse_csr(),
    "CSC": eye.to_sparse_csc(),
    "BSR": eye.to_sparse_bsr((2, 2)),
    "BSC": eye.to_sparse_bsc((2, 2)),
}
for name, tensor in layouts.items():
    module = torch.nn.Linear(4, 4)
    module.register_buffer("graph", tensor)
    for what, act in (
        ("copy.deepcopy(tensor)", lambda: copy.deepcopy(tensor)),
        ("AveragedModel(module)", lambda: AveragedModel(module)),
    ):
        try:
            act()
        except NotImplementedError as error:
            seen = str(error).splitlines()[0]
        else:
            raise SystemExit(f"changed: {what} takes {name}")
        print(f"{name}: {what} raises NotImplementedError: {seen}")
        assert seen.startswith("Cannot access storage of Sparse"), seen
    tensor.clone()
    pickle.loads(pickle.dumps(tensor))
    torch.save(module, io.BytesIO())
copy.deepcopy(eye.to_sparse())
print("clone, pickle and torch.save take all of them; deepcopy takes COO")
PYTHON
