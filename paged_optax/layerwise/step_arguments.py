"""Checks of a layerwise step's arguments."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import as_pure
from paged_optax.backend.memory import PINNED_HOST, nbytes, on_host, typed_by_memory
from paged_optax.backend.processes import Values, compare, spans_processes
from paged_optax.backend.text import dtype_and_shape, key_names, keystr, readable_bytes
from paged_optax.backend.types import KeyPath, is_explicit, shape_dtype
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import nondifferentiable
from paged_optax.engine.shards import Shards
from paged_optax.layerwise.layer_tree import LayerTree, is_stored, stacked_shape
from paged_optax.layerwise.slices import is_sliced
from paged_optax.layerwise.workspace import GradientWorkspace
from paged_optax.transform.context import (
    TYPES,
    Visitor,
    known_shardings,
    sharding_in_type,
    within,
)
from paged_optax.transform.paged_transformation import PagedTransformation, tell
from paged_optax.transform.parameter_shardings import ParameterShardings


class PagedInside(NamedTuple):
    """A paged transformation inside `tx`.

    Attributes:
      moved: A warning about its moments in the wrong memory, or an empty text.
      agreement: The settings that must be equal in all processes.
    """

    transformation: PagedTransformation
    moved: str
    agreement: Values


def find_paged(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    tree: LayerTree | None,
) -> list[PagedInside]:
    """Returns the paged transformations inside `tx`, in the order of their updates.

    A visitor collects them while `tx.update` is traced.
    """
    paged: list[PagedInside] = []
    several = spans_processes((params, state))

    def add(
        transformation: PagedTransformation, moved: str, agreement: Callable[[], Values]
    ) -> None:
        paged.append(PagedInside(transformation, moved, agreement() if several else {}))

    def update(updates: PyTree, state: PyTree, shapes: PyTree) -> object:
        leaves = jax.tree.leaves(shapes)
        shardings: list[Sharding | None] = [None] * len(leaves)
        if tree is None or not tree.length:
            # On explicit axes an encoded moment has its parameter's sharding, which is
            # not in the traced shapes.
            stacks = params if tree is None else tree.unstack(params, list)
            types = [jax.typeof(x).sharding for x in jax.tree.leaves(stacks)]
            shardings = [x if is_explicit(x) else None for x in types]
        with known_shardings(leaves, shardings):
            return tx.update(updates, state, shapes)

    def layer_types(stack: Array) -> list[jax.ShapeDtypeStruct]:
        place = SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED_HOST)
        sharding = typed_by_memory(place) if on_host(stack) else None
        dtype = jax.typeof(stack).dtype
        layer = jax.ShapeDtypeStruct(stack.shape[1:], dtype, sharding=sharding)
        return [layer] * stack.shape[0]

    # A transformation that is not paged may fail here, with a state on the host, though
    # a layer's update does not. Real errors are raised again in the step.
    with contextlib.suppress(Exception), within(visitor=Visitor(update=add)):
        plain = jax.tree.map(shape_dtype, params)
        if tree is not None:
            plain, state = (tree.unstack(x, layer_types) for x in (plain, state))
        jax.eval_shape(update, plain, state, plain)
    return paged


def warn_of_moved(paged: Sequence[PagedInside], workspace: GradientWorkspace) -> None:
    """Warns about arrays that left the host; raises if `on_moved` is `"raise"`."""
    for transformation, moved, _ in paged:
        if moved:
            tell(moved, transformation.on_moved)
    flat = jax.tree_util.tree_flatten_with_path(workspace.host)[0]
    stacks = [(path, x) for path, x in flat if is_sliced(x) and not on_host(x)]
    if not stacks or workspace.on_device:
        return
    raises = any(transformation.on_moved == "raise" for transformation, *_ in paged)
    tell(
        f"gradients of all layers, {readable_bytes(nbytes([x for _, x in stacks]))},"
        f" are in device memory, workspace.host{keystr(stacks[0][0])} first, and belong"
        " on the host: pickle, a copy, a jax.device_put, a restore or out_shardings"
        " without a memory kind moved them. Put",
        "raise" if raises else "warn",
        "workspace",
    )


def compare_processes(
    paged: Sequence[PagedInside],
    params: PyTree,
    state: PyTree,
    workspace: PyTree,
    settings: Mapping[str, object],
) -> None:
    """Compares the arguments of all processes.

    Raises:
      ValueError: If processes differ.
    """
    if not spans_processes((params, state)):
        return
    values: dict[str, Mapping[str, str]] = {
        name: {"": str(value)} for name, value in settings.items()
    }
    for name, tree in (("params", params), ("workspace", workspace)):
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        values[name] = {keystr(path): str(jax.typeof(x)) for path, x in flat}
    for index, (*_, item) in enumerate(paged):
        prefix = f"paged transformation {index}, " if index else ""
        values |= {prefix + name: x for name, x in item.items()}
    compare("layerwise_step", values)


def warn_of_divided_layers(
    paged: Sequence[PagedInside], params: PyTree, frozen: PyTree, key: str
) -> bool:
    """Warns about the first stack that is divided along its layers."""
    for name, tree, sources in ("params", params, paged), ("frozen", frozen, ()):
        for path, x in jax.tree_util.tree_flatten_with_path(as_pure(tree))[0]:
            if key_names(path)[:1] != (key,):
                continue
            shards = _shards(sources, path, x, moments=False)
            if shards is None or shards.divisions[:1] in ((), (1,)):
                continue
            warn_user(
                f"{name}{keystr(path)} of shape {x.shape} is divided along its layers,"
                f" by {shards.spec} over the mesh {dict(shards.mesh.shape)}:"
                " layerwise_step takes one layer at a time, and XLA gathers all of them"
                " on every device. Divide another axis, as"
                " paged_optax.fully_sharded(params, mesh) does."
            )
            return True
    return False


def known_shards(
    paged: Sequence[PagedInside], params: PyTree, *, moments: bool
) -> list[Shards | None]:
    """Returns the division of each parameter, or of its `moments`.

    None if it is not known, or if it divides the leading axis.
    """
    flat = jax.tree_util.tree_flatten_with_path(as_pure(params))[0]
    found = [_shards(paged, path, x, moments) for path, x in flat]
    return [x if x and x.divisions[:1] == (1,) else None for x in found]


def _shards(
    paged: Sequence[PagedInside], path: KeyPath, x: Array, moments: bool
) -> Shards | None:
    """A stack's sharding, or its moments'; None if it is not found."""
    for known in (*(x.transformation.known for x in paged), ParameterShardings()):
        with contextlib.suppress(ValueError):
            if shards := known.find(path, x, moments=moments):
                return shards
    return None


def check_state(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    tree: LayerTree | None,
) -> PyTree | None:
    """Returns the types of the state that `tx.init` makes for the loss's own tree.

    Returns None if stacks are that tree, and `tx.init` reads more than types.

    Raises:
      ValueError: If `state` has other names, or its stacks other types.
    """
    shapes = jax.tree.map(shape_dtype, params)
    if tree is not None:
        shapes = tree.shapes(jax.tree.leaves(shapes))
    try:
        with within(visitor=TYPES):
            unstacked = jax.eval_shape(lambda p: tx.init(p), shapes)
    except (AttributeError, TypeError, ValueError):
        if tree is not None:
            raise
        return None
    fresh = unstacked if tree is None else tree.stack(unstacked, stacked_shape)
    # Encoded moments have other shapes if they are divided on explicit axes.
    divided = any(is_explicit(sharding_in_type(x)) for x in jax.tree.leaves(params))
    typed = tree is not None and tree.length > 0 and not divided

    def described(state: PyTree) -> dict[tuple[str, ...], tuple[str, object]]:
        flat, _ = jax.tree_util.tree_flatten_with_path(
            as_pure(state), is_leaf=is_stored
        )
        types = lambda x: (
            getattr(x, "present", None),
            typed and list(map(dtype_and_shape, jax.tree.leaves(x))),
        )
        return {key_names(path): (keystr(path), types(x)) for path, x in flat}

    expected, leaves = described(fresh), described(state)
    odd = [
        text
        for name, (text, _) in (leaves | expected).items()
        if leaves.get(name, ("", None))[1] != expected.get(name, ("", None))[1]
    ]
    if not odd:
        return unstacked
    if tree is not None and leaves.keys() == described(unstacked).keys():
        raise ValueError(
            "state is the state of an ordinary step, and params are stacked: pass"
            " model.stack_state(state), or model.init(tx, params)."
        )
    names = ", state".join(odd[:3])
    init, place = "tx.init made for these parameters", "paged_optax"
    if tree is not None:
        init, place = "model.init(tx, params) makes", "model"
    raise ValueError(
        "the state's structure is not the one these gradients call for: they differ"
        f" at state{names}. Pass the state that {init}, or that a step returned, after"
        " a restore without a target, or with another mask in tx, by"
        f" {place}.place_state(tx, state, params)."
    )


def check_inexact(params: PyTree) -> None:
    """Raises if a parameter has no gradient."""
    for path, x in nondifferentiable(params):
        raise ValueError(
            f"params{keystr(path)} is {jax.typeof(x)} and has no"
            " gradient: leave it out of params. Tables and keys go to the model"
            " with the batch, and to its layers as the prologue's context."
        )


def check_same_counts(batch: PyTree) -> None:
    """Raises if a batch does not stack the same number of micro-batches."""
    flat = jax.tree_util.tree_flatten_with_path(batch)[0]
    leaves = dict[tuple[int, ...], str]()  # one of each number of micro-batches
    for path, x in flat:
        text = f"batch{keystr(path)} of shape {jnp.shape(x)}"
        leaves.setdefault(jnp.shape(x)[:1], text)
    if len(leaves) != 1 or leaves.keys() & {(), (0,)}:
        shapes = ", ".join([*leaves.values()][:3])
        raise ValueError(
            f"accumulate=True with {shapes or 'no arrays in the batch'}:"
            " stack each leaf of the micro-batches on a leading axis, of one length for"
            " all; repeat what they share, as in jnp.stack([state] * count),"
            " but for keys and counts of random numbers: each has its own."
        )
