"""Self-check of a backend, once a process, before it pages real moments.

XLA:GPU before openxla/xla#46308 computed wrong addresses for some host slices, and
nothing failed: only the numbers were wrong. Before a process first pages on an
accelerator, the engine updates a few distinct pages, which are compared.
"""

import functools
import inspect
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_optax.analysis.flat import trace
from paged_optax.analysis.per_leaf import analyse
from paged_optax.analysis.program import LeafUpdate
from paged_optax.backend.compiler_options import addressing_options
from paged_optax.engine.loop import LeafProgram
from paged_optax.engine.pages import MomentFormat
from paged_optax.engine.sharing import cut
from paged_optax.engine.stream import fill, stream


class BackendError(RuntimeError):
    """This backend corrupts pages."""


def check_backend() -> None:
    """Updates distinct pages and compares them, once a process.

    Runs on accelerators only. `PAGED_OPTAX_SELF_CHECK=0` in the environment switches it
    off. It compiles three small programs: 0.4 to 0.5 seconds on one core for XLA:CPU,
    and 2 to 7 milliseconds for the run (jax 0.10.2 and 0.12.0.1).

    It detects reads and writes that are a row or a page off, in either direction, and
    reads exchanged with writes, in serial and in duplex schedules.
    """
    backend = jax.default_backend()
    if backend != "cpu" and os.environ.get("PAGED_OPTAX_SELF_CHECK", "1") != "0":
        run_check(backend)


@functools.cache
def run_check(backend: str) -> None:
    """Compares five pages and a smaller last one with NumPy."""
    shape, rows = (89, 128), 16  # five pages of 15 rows, and one of 14
    geometry = cut(shape, (MomentFormat(4), MomentFormat(4)), rows * shape[1] * 4)
    update = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    starts = lambda update: (3 * update + 1,), lambda update: (5 * update + 2,)
    step = lambda update, mu, nu: (nu - mu + update, mu + update, nu - update)
    options = addressing_options(jax.local_devices()[0]) or None
    jit = functools.partial(jax.jit, compiler_options=options)
    with jax.ensure_compile_time_eval():
        # As `init` makes moments, and as `update` reads and writes two of them.
        array = jnp.asarray(update)
        fill_pages = functools.partial(fill, geometry=geometry, dtype=array.dtype)
        programs = [_leaf_update(start, shape).program for start in starts]
        moments = [
            jit(functools.partial(fill_pages, program=x))((array,)) for x in programs
        ]
        leaf = _leaf_update(step, shape)
        arrays = (array, *moments)
        overwrites = tuple(leaf.inputs.index(i) for i in leaf.outputs)
        program = LeafProgram(leaf.program, overwrites, (None,) * len(arrays))
        update_of = functools.partial(stream, leaf=program, geometry=geometry)
        (results,) = jit(update_of)((tuple(arrays[i] for i in leaf.inputs),))
    expected = step(update, *(start(update)[0] for start in starts))
    names = ("update", "first moment", "second moment")
    for name, new, right in zip(names, results, expected, strict=True):
        invalid = np.flatnonzero((np.asarray(new) != right).any(1))
        if invalid.size:
            raise BackendError(
                f"jax {jax.__version__} corrupts pages on {backend}: rows"
                f" {invalid[:8].tolist()} of the {name} are wrong in the self-check."
                " Install jax 0.11.2 or newer, known to be good, and report this with"
                " your driver's version; PAGED_OPTAX_SELF_CHECK=0 skips the check."
            )


def _leaf_update(
    function: Callable[..., tuple[Array, ...]], shape: tuple[int, ...]
) -> LeafUpdate:
    count = len(inspect.signature(function).parameters)
    closed, _ = trace(function, *[jax.ShapeDtypeStruct(shape, jnp.float32)] * count)
    param_indices = [0, *[None] * (count - 1)]
    (leaf,) = analyse(closed, param_indices, param_indices, str)[0].leaf_updates
    return leaf
