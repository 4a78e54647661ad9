"""The master weights of a state."""

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, PyTree

from paged_optax.backend.given import refuse_no_arrays
from paged_optax.backend.key_paths import name_of
from paged_optax.backend.types import KeyPath
from paged_optax.state.leaves import leaves_of
from paged_optax.transform.remainders import joined


def master_weights(
    params: optax.Params, state: optax.OptState
) -> PyTree[Float[Array, "..."]]:
    """The parameters in the precision in which they are trained.

    With `master_dtype` they are the copies that the state keeps; with
    `master_remainders` half of each is its parameter. Parameters that a state keeps
    nothing of are their own masters, in float32.

    Args:
      params: The parameters, as the last step left them.
      state: The state of the same step.

    Returns:
      A tree of the parameters' structure, on the device: 4 bytes a parameter. For
      some of them only, pass these: `{"embed": params["embed"]}`.

    Raises:
      ValueError: If the state keeps no master weights, or not of these parameters.

    Example:
      >>> import jax.numpy as jnp, optax, paged_optax as po
      >>> params = {"w": jnp.ones((512, 512), jnp.bfloat16)}
      >>> tx = po.paged(optax.sgd(1e-4), master_remainders=True)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> params["w"][0, 0], po.master_weights(params, state)["w"][0, 0]
      (Array(1, dtype=bfloat16), Array(0.9999, dtype=float32))
    """
    refuse_no_arrays("params", params)
    kept = {
        (leaf.field, leaf.parameter): leaf.value
        for leaf in leaves_of(state)
        if leaf.field in ("master", "remainder")
    }
    if not kept:
        raise ValueError(
            "the state keeps no master weights: make it with"
            " paged(..., master_remainders=True), or master_dtype='float32'."
        )
    on_device = {
        key: jax.device_put(value, jax.memory.Space.Device)
        for key, value in kept.items()
    }

    def master(path: KeyPath, parameter: Array) -> Array:
        name = name_of(path)
        if ("master", name) in on_device:
            return on_device["master", name]
        if ("remainder", name) in on_device:
            return joined(parameter, on_device["remainder", name])
        if parameter.dtype == jnp.bfloat16:
            raise ValueError(
                f"params: the state keeps no master of {name!r}, only of"
                f" {', '.join(repr(x) for _, x in kept)[:60]}: pass the parameters that"
                " the state was made with, or some of them under their own paths."
            )
        return joined(parameter, ())

    return jax.tree_util.tree_map_with_path(master, params)
