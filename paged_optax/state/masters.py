"""The master weights of a state."""

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, PyTree

from paged_optax.backend.text import key_names, path_name
from paged_optax.backend.types import KeyPath
from paged_optax.backend.validation import check_arrays
from paged_optax.state.leaves import leaves_of
from paged_optax.transform.precision import master_beside, wider
from paged_optax.transform.remainders import master_of

#: Where a state keeps masters, or the halves of them that parameters lack, and what
#: gives the master of a parameter with either.
_OF_FIELD = {"master": master_beside, "remainder": master_of}


def master_weights(
    params: optax.Params, state: optax.OptState
) -> PyTree[Float[Array, "..."]]:
    """The parameters in the precision in which they are trained.

    With `master_dtype` they are the copies that the state keeps; with
    `master_remainders` half of each is its parameter. Parameters in float32 that the
    state keeps nothing of are their own masters.

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
    check_arrays("params", params)
    found = {
        (leaf.field, _named(leaf.parameter)): leaf.value for leaf in leaves_of(state)
    }

    def master(path: KeyPath, parameter: Array) -> Array:
        name = _named(path)
        for field in _OF_FIELD:
            half = found.get((field, name))
            if half is not None and half.shape == parameter.shape:
                half = jax.device_put(half, jax.memory.Space.Device)
                return _OF_FIELD[field](parameter, half)
        if wider(parameter, jnp.float32) is parameter:
            return parameter
        known = [repr("/".join(name)) for field, name in found if field in _OF_FIELD]
        if known:
            raise ValueError(
                f"params: the state keeps no master of {path_name(path)!r} of shape"
                f" {parameter.shape}, only of {', '.join(known[:3])}: pass the"
                " parameters that the state was made with, or some of them under their"
                " own paths."
            )
        raise ValueError(
            "the state keeps no master weights: make it with"
            " paged(..., master_remainders=True), or master_dtype='float32'."
        )

    return jax.tree_util.tree_map_with_path(master, params)


def _named(path: KeyPath) -> tuple[str, ...]:
    """The names of a parameter's keys, in a variable of Flax or not."""
    names = key_names(path)
    return names[:-1] if names[-1:] == ("value",) else names
