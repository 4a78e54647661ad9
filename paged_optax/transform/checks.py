"""Checks of the arguments of `init` and `update`."""

from collections.abc import Callable, Sequence, Set
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.analysis.program import Analysis
from paged_optax.backend.memory import on_host
from paged_optax.backend.text import dtype_and_shape, keystr
from paged_optax.backend.types import ArrayOrShape, KeyPath, shape_dtype
from paged_optax.backend.user_warnings import called_by, warn_user
from paged_optax.backend.validation import check_arrays
from paged_optax.codecs import Quantized
from paged_optax.transform.context import current, within
from paged_optax.transform.trees import Value, leaf_paths


def check_dtype(path: KeyPath, leaf: ArrayOrShape) -> None:
    """Raises if a parameter's dtype has no moments."""
    dtype = jax.typeof(leaf).dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"parameter {keystr(path)} has dtype {dtype}: only floating point and"
            " complex parameters have moments. Leave it out with"
            " optax.masked(paged(...), mask), or optax.partition."
        )


def check_not_nested() -> None:
    """Raises inside another paged transformation."""
    if current().inside_paged:
        raise ValueError(
            "paged(inner) is given an inner with a paged transformation inside, and"
            " pages all moments of inner itself: pass inner plain, such as optax.adamw"
            " in place of paged_adamw; or use what is inside without paged(...) around."
        )


def paged_by_one(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that refuses paged ones inside."""

    def alone(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def call(*args: PyTree, **kwargs: object) -> PyTree:
            with within(inside_paged=True):
                return function(*args, **kwargs)

        return call

    return optax.GradientTransformationExtraArgs(alone(inner.init), alone(inner.update))


def check_arguments(
    updates: PyTree, state: PyTree, params: PyTree | None, *, visited: bool = False
) -> None:
    """Raises unless an update's arguments are arrays, and only moments on the host."""
    check_arrays("state", state, shapes=False)
    check_arrays("updates", updates, shapes=False, numbers=True)
    check_arrays("params", params, shapes=False, numbers=True)
    if not visited:
        check_on_device("gradient", updates)
        check_on_device("parameter", params)


def check_on_device(what: str, tree: PyTree) -> None:
    """Raises if parameters or gradients are in host memory."""
    for path, leaf in zip(*leaf_paths(tree), strict=True):
        if on_host(leaf):
            raise ValueError(
                f"{what} {keystr(path)} is in host memory ({jax.typeof(leaf)}): only"
                " moments belong there. A jax.jit that holds no update, and is given"
                " donated moments, can return anything of their shape in their place:"
                " use paged_optax.jit_step, or state out_shardings. To mend an array,"
                " use jax.device_put(x, jax.memory.Space.Device). The gradient of a"
                " parameter in host memory is there too: mend the parameter."
            )


def warn_of_multi_steps(state: Sequence[Value]) -> None:
    """Warns if Optax's own `MultiSteps` traces an update of a state on the host."""
    if called_by("optax.transforms._accumulation") and any(map(on_host, state)):
        warn_user(
            "optax.MultiSteps transfers the whole state in each micro-step, and selects"
            " between the old and the new one: XLA copies a state in host memory whole"
            " for it, or does not compile. Instead, use paged_optax.MultiSteps, which"
            " takes the same arguments and gives the same numbers."
        )


def check_not_differentiated(arrays: Sequence[Value]) -> tuple[Value, ...]:
    """Returns arrays that refuse derivatives and `vmap`."""
    # Codes and counts have no derivatives.
    inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    checked = lambda x: _check_not_differentiated(x) if inexact(x) else x
    return jax.tree.map(checked, tuple(arrays))


@jax.custom_batching.custom_vmap
def _check_not_batched(x: Array) -> Array:
    return x


@_check_not_batched.def_vmap
def _(*_: object) -> NoReturn:
    raise ValueError(
        "update has moments in host memory, and is called within jax.vmap, which would"
        " gather pages there. Call init and update on the stacked parameters, without"
        " vmap: what works element by element has the same numbers; else use"
        " device_budget=None."
    )


@jax.custom_jvp
def _check_not_differentiated(x: Array) -> Array:
    return _check_not_batched(x)


@_check_not_differentiated.defjvp
def _(*_: object) -> NoReturn:
    raise ValueError(
        "update has moments in host memory, through which JAX takes no derivative. To"
        " differentiate it use the transformation without paging, or"
        " device_budget=None, for init and update; else call update on"
        " jax.lax.stop_gradient(...) of what is differentiated."
    )


def note_elsewhere(error: ValueError) -> None:
    """Adds the way out to JAX's error about incompatible devices."""
    if "incompatible devices" in str(error):
        error.add_note(
            "If a state is not on its parameters' devices, put it there by"
            " paged_optax.place_state(tx, state, params). A jax.jit of tx.init knows of"
            " no mesh, except within jax.set_mesh(mesh), and makes a state on one"
            " device."
        )


def check_equal_values(updates: PyTree, params: PyTree) -> None:
    """Raises if gradients and parameters differ in structure or shape."""
    gradients, parameters = _by_path(updates), _by_path(params)
    if jax.tree.structure(updates) != jax.tree.structure(params):
        differ = gradients.keys() ^ parameters.keys()
        odd = sorted(map(keystr, differ)) or ["(another container type)"]
        raise ValueError(
            "the gradients' structure differs from the parameters' at"
            f" {', '.join(odd[:3])}: pass gradients taken of these parameters."
        )
    for path, x in gradients.items():
        if np.shape(x) != np.shape(parameters[path]):
            raise ValueError(
                f"gradient {keystr(path)} has shape {np.shape(x)}, its parameter"
                f" {np.shape(parameters[path])}: pass gradients taken of these"
                " parameters."
            )


def _by_path(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> dict[KeyPath, PyTree]:
    return dict(jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0])


def check_state_structure(
    inner: optax.GradientTransformation,
    updates: PyTree,
    state: PyTree,
    error: Exception,
) -> None:
    """Raises with the leaf in which a state differs from `inner.init`'s."""
    try:
        shapes = jax.eval_shape(inner.init, jax.tree.map(shape_dtype, updates))
    except Exception:
        return  # the gradients are no parameters: the first error has more information
    expected, leaves = _by_path(shapes), _by_path(state)
    # A coded moment has several arrays, which are compared only if all moments match.
    moments = _by_path(state, lambda x: isinstance(x, Quantized))
    for paths in (moments, leaves):
        either = {**paths, **expected}
        odd = [keystr(x) for x in either if (x in paths) != (x in expected)]
        if odd:
            raise ValueError(
                "the state's structure is not the one these gradients call for: they"
                f" differ at state{', state'.join(odd[:3])}. Pass the state that this"
                " transformation's init made for these parameters, after a restore"
                " without a target by place_state(tx, state, params), after layerwise"
                " steps by model.unstack_state(state)."
            ) from error
    for path, leaf in leaves.items():
        if leaf.shape != expected[path].shape:
            raise ValueError(
                f"state{keystr(path)} has shape {leaf.shape}, and these gradients call"
                f" for {expected[path].shape}: pass the state that this"
                " transformation's init made for these parameters."
            ) from error


def check_own_counts(
    analysis: Analysis, counts: Set[int], state: PyTree, gradients: int
) -> None:
    """Raises if a value shared by all parameters depends on their step counts."""
    reached = analysis.reached_from(counts)
    shared = [p for p, x in analysis.direct if x in reached and p not in counts]
    for leaf in analysis.leaf_updates:
        if gradients > 1:  # a count that depends on one parameter's gradient
            shared += counts & {*leaf.outputs}
        if leaf.param_index is None and reached.intersection(leaf.inputs):
            shared += leaf.outputs
    if shared:
        path = leaf_paths(state)[0][max(0, shared[0] - gradients)]
        raise ValueError(
            f"per_parameter_steps=True, but state{keystr(path)} is one value for all"
            " parameters and is computed from their step counts: put what keeps it"
            " (optax.inject_hyperparams, optax.flatten) around paged(...)."
        )


def check_unchanged(
    shapes: tuple[PyTree, PyTree], updates: PyTree, state: PyTree
) -> None:
    """Raises if an update changes structures, shapes or dtypes."""
    new_updates, new_state = shapes
    every = ("update", updates, new_updates), ("state", state, new_state)
    for what, old, new in every:
        pairs = zip(*leaf_paths(old), jax.tree.leaves(new), strict=True)
        for path, before, after in pairs:
            same_dtype = what == "update" or before.dtype == after.dtype
            if np.shape(before) == after.shape and same_dtype:
                continue
            hint = ""
            if what == "state" and after.dtype.itemsize > before.dtype.itemsize:
                hint = (
                    f" To keep such moments in {after.dtype}, build tx with"
                    f' master_dtype="{after.dtype}"; or with mu_dtype="{after.dtype}",'
                    " where the optimizer takes it. To keep them in"
                    f" {before.dtype}, build it with codec={str(before.dtype)!r} alone."
                )
            raise ValueError(
                f"{what} {keystr(path)} would turn from {jax.typeof(before)} into"
                f" {dtype_and_shape(after)}, and could not stay in its own buffer: pass"
                " gradients of the shapes and dtypes that the state was made for, and"
                f" the codec and mu_dtype that it was made with.{hint}"
            )
