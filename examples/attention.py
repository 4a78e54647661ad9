"""Causal attention of the examples, by cuDNN where the GPU has it."""

import jax
import jax.numpy as jnp


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Computes causal attention of `[..., length, heads, head]`.

    cuDNN's flash attention holds no scores. Each key may have several queries' heads.

    Args:
        query: The queries.
        key: The keys.
        value: The values.
        mask: `[..., queries, keys]`, true where a query sees a key; or None. Packed
            rows have one that is true within a document.
    """
    if mask is not None:
        mask = mask[..., None, :, :]
    device, dtype = jax.devices()[0], query.dtype
    how = "cudnn" if has_cudnn(device, query) else "xla"
    if not has_products(device, dtype):
        # XLA refuses the products' algorithm that JAX chooses (jax 0.12.0.1).
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, implementation=how
    ).astype(dtype)


def has_products(device: jax.Device, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether XLA multiplies a dtype as `jax.nn` asks for.

    It has bfloat16 on GPUs from Ampere on, and float16 on no CPU.
    """
    if "cuda" in device.client.platform_version:
        return dtype != jnp.bfloat16 or generation(device) >= 8
    return dtype != jnp.float16 or device.platform != "cpu"


def has_cudnn(device: jax.Device, query: jax.Array) -> bool:
    """Returns whether cuDNN's flash attention of a GPU takes these queries.

    It has backward passes of heads of 256 on Hopper alone.
    """
    if "cuda" not in device.client.platform_version:
        return False
    *_, length, _, head = query.shape
    fits = head % 8 == 0 and head <= (256 if generation(device) == 9 else 128)
    # With a mask, cuDNN needs an even length.
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    return generation(device) >= 8 and half and fits and length % 2 == 0


def generation(device: jax.Device) -> int:
    """Returns the major compute capability of a GPU."""
    return int(device.compute_capability.partition(".")[0])
