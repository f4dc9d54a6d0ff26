#!/usr/bin/env bash
# optax 0.2.8: a first step with gradients of 0 makes NaN of all weights with prodigy, and dadapt_adamw follows.
#
# Seen with optax 0.2.8, jax 0.10.2 (CPU), numpy 2.4.6, Python 3.11: both estimate their rate as a quotient of sums over past
# gradients, which is 0/0 if all of them are 0. The first batch has such gradients if its tokens are all masked, or if a loss
# with a margin is 0 for each of its samples. The weights are NaN for good: prodigy's at once, dadapt_adamw's from the
# next step on. As a later batch it does no harm, and adamw takes it as the first too.
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


def finite(optimizer, gradients):
    """Whether all weights are numbers after each step."""
    weights = {"layer": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    state, seen = optimizer.init(weights), []
    for gradient in gradients:
        updates, state = optimizer.update(jax.tree.map(lambda each: jnp.full_like(each, gradient), weights), state, weights)
        weights = optax.apply_updates(weights, updates)
        seen.append(all(bool(jnp.isfinite(each).all()) for each in weights.values()))
    return seen


for name, optimizer, first in (
    ("adamw", optax.adamw(0.001), [True, True, True]),
    ("prodigy", optax.contrib.prodigy(), [False, False, False]),
    ("dadapt_adamw", optax.contrib.dadapt_adamw(), [True, False, False]),
):
    seen, later = finite(optimizer, (0.0, 1.0, 1.0)), finite(optimizer, (1.0, 0.0, 1.0))
    print(f"{name}: weights are finite after gradients 0, 1, 1: {seen}; after 1, 0, 1: {later}")
    assert seen == first and all(later), f"changed: {name}"
PYTHON
