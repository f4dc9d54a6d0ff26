#!/usr/bin/env bash
# optax 0.2.8: the norm of many bfloat16 gradients is too small, so that clipping lets them through.
#
# Seen with optax 0.2.8, jax 0.10.2 (CPU), numpy 2.4.6, Python 3.11: optax.tree.norm adds the squares of each tensor exactly
# enough, and then the sums of the tensors in bfloat16, in which 256 + 1 is 256. 1,000 gradients whose norms are 1 have
# the norm 16, instead of 31.6; one tensor with the same numbers has 31.6. clip_by_global_norm(1) then leaves a norm of 2,
# and the more layers a model has as separate tensors, the more. In float16 1,000 gradients of 100 have the norm inf,
# and clipping makes zeros of them all, which is no step. Nothing is said. In float32 both are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet optax==0.2.8 jax==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W error - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

assert (optax.__version__, jax.__version__) == ("0.2.8", "0.10.2")


def clipped(gradients):
    """The norm that optax sees, and the norm, in float32, of what clipping to 1 leaves."""
    kept, _ = optax.clip_by_global_norm(1.0).update(gradients, None)
    left = optax.tree.norm(jax.tree.map(lambda each: each.astype(jnp.float32), kept))
    return float(optax.tree.norm(gradients)), round(float(left), 2)


def layers(dtype, number=1.0):
    return [jnp.full(1, number, dtype) for _ in range(1000)]


for name, gradients, expected in (
    ("1,000 tensors of 1, float32", layers(jnp.float32), (31.62, 1.0)),
    ("1,000 tensors of 1, bfloat16", layers(jnp.bfloat16), (16.0, 1.98)),
    ("a tensor of 1,000 times 1, bfloat16", [jnp.ones(1000, jnp.bfloat16)], (31.62, 1.0)),
    ("1,000 tensors of 100, float32", layers(jnp.float32, 100.0), (3162.28, 1.0)),
    ("1,000 tensors of 100, float16", layers(jnp.float16, 100.0), (float("inf"), 0.0)),
):
    norm, left = clipped(gradients)
    print(f"{name}: norm {norm:.2f}; clipped to 1, the norm is {left}")
    assert all(abs(seen - value) <= 0.02 or seen == value for seen, value in zip((norm, left), expected)), "changed"
PYTHON
