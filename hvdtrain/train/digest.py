"""A fingerprint of a model's weights."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["weights_digest"]


def weights_digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers of this rank's model (local).

    Names, types, shapes and bytes count, in the order of state_dict().
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()
