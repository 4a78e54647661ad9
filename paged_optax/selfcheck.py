"""A backend is checked once before it is trusted with real moments.

XLA:GPU before openxla/xla#46308 computed wrong addresses for some host slices, and
nothing failed: only the numbers were wrong. So before a process first pages on an
accelerator, a few distinct pages go through the engine and are compared.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from paged_optax import granularity
from paged_optax.memory import HOST
from paged_optax.plan import cut
from paged_optax.stream import stream


class BackendError(RuntimeError):
    """This backend corrupts pages."""


def check_backend() -> None:
    """Sends distinct pages through the engine and compares them, once a process.

    Runs on accelerators only, in milliseconds. `PAGED_OPTAX_SELF_CHECK=0` in the
    environment switches it off.

    Raises:
      BackendError: If a page came back wrong.
    """
    backend = jax.default_backend()
    if backend != "cpu" and os.environ.get("PAGED_OPTAX_SELF_CHECK", "1") != "0":
        run_check(backend)


@functools.cache
def run_check(backend: str) -> None:
    """Compares five pages and a smaller last one with the same sums on NumPy."""
    shape, rows = (90, 128), 16  # five pages of 16 rows, and one of 10
    with jax.ensure_compile_time_eval():
        closed, _ = granularity.trace(
            lambda update, moment: (update - moment, moment + 2 * update),
            *[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2,
        )
        analysis = granularity.analyse(closed, (0, None), (0, None), str)
        (leaf,) = analysis.leaves
        update = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        moment = update[::-1, ::-1] * 3
        arrays = [jnp.asarray(update), jax.device_put(moment, HOST)]
        pages = cut(shape, (4,), rows * shape[1] * 4)
        found = stream(
            tuple(arrays[i] for i in leaf.inputs),
            program=leaf.program,
            overwrites=tuple(leaf.inputs.index(i) for i in leaf.outputs),
            pages=pages,
        )
    wanted = (update - moment, moment + 2 * update)
    for name, new, right in zip(("update", "moment"), found, wanted, strict=True):
        wrong = np.flatnonzero((np.asarray(new) != right).any(1))
        if wrong.size:
            raise BackendError(
                f"jax {jax.__version__} corrupts pages on {backend}: rows"
                f" {wrong[:8].tolist()} of the {name} are wrong in the self-check."
                " Install jax 0.11.2 or newer, known to be good, and report this with"
                " your driver's version; PAGED_OPTAX_SELF_CHECK=0 skips the check."
            )
