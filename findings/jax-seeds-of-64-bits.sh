#!/usr/bin/env bash
# JAX 0.10.2: of a seed with 64 bits only the lower 32 are used, so that ranks get the same random numbers.
#
# Seen with jax 0.10.2 (CPU), numpy 2.4.6, Python 3.11: jax.random.key and PRNGKey take "a 64- or 32-bit integer". Unless
# jax_enable_x64 is set, they drop the upper half: seed + rank * 2**32 is one key on all ranks, with equal dropout masks and
# equal initial weights, and so are seeds of hashes that agree in 32 bits. fold_in does the same with an int64 of numpy, and
# refuses a Python integer. 2**64 is refused by key, which makes one expect that what is taken counts. With jax_enable_x64
# the keys differ. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W error - <<'PYTHON'
import jax
import numpy as np

assert jax.__version__ == "0.10.2"


def drawn(seeds):
    return [round(float(jax.random.normal(jax.random.key(seed))), 4) for seed in seeds]


seeds = [7 + rank * 2**32 for rank in range(4)]
cut = drawn(seeds)
print(f"seeds {seeds}: {cut}")
assert len(set(cut)) == 1, "changed: key"
assert len(set(drawn([7 + rank for rank in range(4)]))) == 4, "changed: small seeds"

folded = {str(jax.random.key_data(jax.random.fold_in(jax.random.key(0), np.int64(seed)))) for seed in seeds}
print(f"fold_in of them as int64: {folded}")
assert len(folded) == 1, "changed: fold_in"
for name, call in (
    ("fold_in of a Python integer", lambda: jax.random.fold_in(jax.random.key(0), seeds[1])),
    ("key of 2**64", lambda: jax.random.key(2**64)),
):
    try:
        call()
    except OverflowError as error:
        print(f"{name}: OverflowError: {error}")
    else:
        raise SystemExit(f"changed: {name}")

jax.config.update("jax_enable_x64", True)
whole = drawn(seeds)
print(f"with jax_enable_x64: {whole}")
assert len(set(whole)) == 4, "changed: 64 bits"
PYTHON
