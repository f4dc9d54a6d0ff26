#!/usr/bin/env bash
# pytorch-metric-learning 2.9.0: a saved CrossBatchMemory is loaded, and not used.
#
# Seen with pytorch-metric-learning 2.9.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: the memory holds embeddings of earlier
# batches, with which each new batch is compared. state_dict() has them, and load_state_dict() restores them without a
# complaint; where the next one goes, and whether the memory is full, it has not. So the restored loss takes the memory
# for empty: its first batch is compared with itself alone, and the loss is that of a new memory, until that is full again.
# With the usual memory of thousands of embeddings this takes many steps, with fewer negatives in each. If both
# attributes are set by hand, the losses are those without a restart. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pytorch-metric-learning==2.9.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from pytorch_metric_learning.losses import ContrastiveLoss, CrossBatchMemory

assert (version("pytorch-metric-learning"), torch.__version__[:6]) == ("2.9.0", "2.13.0")
torch.manual_seed(0)
batches = [(torch.randn(4, 3), torch.tensor([0, 0, 1, 1])) for _ in range(8)]


def memory():
    return CrossBatchMemory(ContrastiveLoss(), 3, memory_size=16)


def losses(loss, which):
    return [round(loss(*batch).item(), 4) for batch in which]


whole = losses(memory(), batches)
first = memory()
losses(first, batches[:5])
restored = memory()
restored.load_state_dict(first.state_dict())
assert torch.equal(restored.embedding_memory, first.embedding_memory), "changed: embeddings"
continued, new = losses(restored, batches[5:]), losses(memory(), batches[5:])
print(f"not interrupted {whole[5:]}; restored after 5 batches {continued}; a new memory {new}")
assert continued == new != whole[5:], "changed: losses"

by_hand = memory()
by_hand.load_state_dict(first.state_dict())
losses(first := memory(), batches[:5])
by_hand.queue_idx, by_hand.has_been_filled = first.queue_idx, first.has_been_filled
assert losses(by_hand, batches[5:]) == whole[5:], "changed: by hand"
PYTHON
