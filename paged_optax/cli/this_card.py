"""The accelerator of this machine, measured, as a card among those known by name."""

import statistics
import time

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from paged_optax.backend.gpu import compute_capability
from paged_optax.backend.memory import device_memory, device_share
from paged_optax.cli import bandwidth
from paged_optax.cli.machine import host_available
from paged_optax.planning.cards import Card

#: Rows and columns of the matrices: large enough for a card's own rate.
SIDE = 8192
# Products of one call, so that the time of the call itself is none of theirs.
_PRODUCTS = 8

Square = Float[Array, "side side"]


def products(x: Square, w: Square) -> Square:
    """`x` times `w`, times `w`, and so on."""
    return lax.fori_loop(0, _PRODUCTS, lambda _, x: x @ w, x)


def knows_bfloat16() -> bool:
    """Whether the tensor cores do: on a GPU of compute capability 8.0 or more."""
    capability = compute_capability(jax.local_devices()[0])
    return capability is None or capability >= 8


def teraflops(
    side: int = SIDE, repeats: int = 3, *, dtype: DTypeLike = jnp.bfloat16
) -> float:
    """The rate of products, in 10^12 operations a second.

    Args:
      side: Rows and columns of a matrix.
      repeats: Calls timed, after one that is not.
      dtype: Of the matrices.
    """
    w = jnp.full((side, side), 1 / side, dtype)
    x, jitted, seconds = jnp.ones_like(w), jax.jit(products), []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        jax.block_until_ready(jitted(x, w))
        seconds.append(time.perf_counter() - started)
    return _PRODUCTS * 2 * side**3 / statistics.median(seconds[1:]) / 1e12


def measured_card() -> Card:
    """This machine's card: its memory, and the rates that were measured.

    The link's are those of page by page, of the slower direction, and of both at once.

    Raises:
      ValueError: If there is none, or too little memory is left to measure.
    """
    rates = {rate.name: rate for rate in bandwidth.measure(bandwidth.SIZE, 3)}
    for rate in rates.values():
        if rate.reason:
            raise ValueError(
                f"--card measured: {rate.reason}; pass --device-memory, --link and"
                " --teraflops."
            )
    paged = [rate for name, rate in rates.items() if name.endswith("in pages")]
    gpu = jax.default_backend() == "gpu"
    limit, _ = device_memory()
    fast = jnp.bfloat16 if knows_bfloat16() else jnp.float16
    return Card(
        int(limit / device_share()) if gpu else limit,
        min(rate.median for rate in paged if rate.directions == 1),
        max(rate.median for rate in paged if rate.directions == 2),
        teraflops(dtype=fast),
        gpu,
        None if knows_bfloat16() else teraflops(),
        host_available(),
    )
