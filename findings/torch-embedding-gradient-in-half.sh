#!/usr/bin/env bash
# PyTorch 2.13.0: in bfloat16, the gradient of an embedding counts 256 uses of a row and no more, on CPUs.
#
# Seen with torch 2.13.0 (CPU), Python 3.11: the gradient of a row that a batch uses 5000 times, with gradients of 1, is
# 256 in bfloat16 and 2048 in float16: the sum is kept in the type of the weights, and once it is that large adding 1
# changes nothing. It is 4992 and 5000, the nearest numbers, from gather, a sum, or a product of matrices, which add up
# in float32. Frequent tokens, padding without padding_idx, position and type embeddings, whose gradients are alike, learn at a
# twentieth of their rate. EmbeddingBag, sparse gradients, and tensor[indices] do the same. Autocast does not, as its
# weights are float32; models in bfloat16 do. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - <<'PYTHON'
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
USES = 5000
tokens = torch.zeros(USES, dtype=torch.long)


def embedding(weight):
    return torch.nn.functional.embedding(tokens, weight)


def sparse(weight):
    return torch.nn.functional.embedding(tokens, weight, sparse=True)


def bag(weight):
    return torch.nn.functional.embedding_bag(tokens[:, None], weight, mode="sum")


def gather(weight):
    return weight.gather(0, tokens[:, None].expand(-1, 8))


def product(weight):
    return torch.nn.functional.one_hot(tokens, len(weight)).to(weight.dtype) @ weight


def gradient(use, dtype):
    weight = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    use(weight).sum().backward()
    return weight.grad.to_dense()[0, 0].item()


for dtype, stuck, nearest in ((torch.bfloat16, 256, 4992), (torch.float16, 2048, 5000), (torch.float32, 5000, 5000)):
    short = {use.__name__: gradient(use, dtype) for use in (embedding, sparse, bag)}
    short |= {"tensor[indices]": gradient(lambda weight: weight[tokens], dtype)}
    right = {use.__name__: gradient(use, dtype) for use in (gather, product)}
    print(f"{dtype}, {USES} gradients of 1: {short}, but {right}")
    assert set(short.values()) == {stuck}, "changed"
    assert set(right.values()) == {nearest}, "changed: gather, product"
PYTHON
