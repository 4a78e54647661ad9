"""Trees of parameter shapes, and arrays that fill them."""

import functools
import math

import jax
import jax.numpy as jnp

Shapes = dict[str, tuple[int, ...]]


def squares(leaves: int, width: int) -> Shapes:
    """`leaves` square matrices."""
    return {f"leaf {i}": (width, width) for i in range(leaves)}


def decoder(width: int, layers: int, vocabulary: int) -> Shapes:
    """A decoder-only transformer with tied embeddings; parts of a layer are leaves."""
    shapes: Shapes = {"embedding": (vocabulary, width)}
    for i in range(layers):
        shapes |= {
            f"{i} attention in": (width, 3 * width),
            f"{i} attention out": (width, width),
            f"{i} mlp in": (width, 4 * width),
            f"{i} mlp out": (4 * width, width),
            f"{i} attention norm": (width,),
            f"{i} mlp norm": (width,),
        }
    return shapes


#: What the update is measured on.
SIZES: dict[str, Shapes] = {
    "8 x 2048x2048": squares(8, 2048),
    "0.1 B": decoder(width=768, layers=12, vocabulary=20480),
    "1 B": decoder(width=2048, layers=18, vocabulary=50304),
    # 1, 4, 16 and 64 MiB a leaf; the first is --quick's.
    **{f"8 x {n}x{n}": squares(8, n) for n in (512, 1024, 4096)},
}


def count(shapes: Shapes) -> int:
    """Number of values."""
    return sum(map(math.prod, shapes.values()))


def fill(shapes: Shapes, scale: float) -> dict[str, jax.Array]:
    """Distinct float32 values of about `scale`, each leaf made without scratch."""
    return {
        name: _wave(shape, jnp.float32(scale), jnp.float32(i))
        for i, (name, shape) in enumerate(shapes.items())
    }


@functools.partial(jax.jit, static_argnums=0)
def _wave(shape: tuple[int, ...], scale: jax.Array, phase: jax.Array) -> jax.Array:
    position = sum(
        jax.lax.broadcasted_iota(jnp.float32, shape, axis) * (0.37 + axis)
        for axis in range(len(shape))
    )
    return scale * jnp.sin(position + phase)
