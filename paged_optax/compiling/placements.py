"""Where a step's arguments and results are."""

from collections.abc import Callable, Set

import jax
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import (
    is_mistyped,
    memory_kind,
    on_host,
    typed_by_memory,
)
from paged_optax.backend.types import Device, KeyPath, is_committed
from paged_optax.compiling.arguments import Call, place_of
from paged_optax.compiling.host_arithmetic import warn_of_host_compute

#: An array among the arguments, as messages name it; its shape and its dtype.
Described = tuple[str, tuple[int, ...], object]


def hosted(call: Call) -> set[Described]:
    """The arrays of a call that belong in host memory."""
    return {
        _described(call, path, x)
        for path, x in jax.tree_util.tree_flatten_with_path(call.values)[0]
        if on_host(x) or is_mistyped(x)
    }


def refuse_moved(call: Call, known: Set[Described]) -> None:
    """Refuses an array that is typed as device memory and belongs on the host.

    Args:
      call: What a step is called with.
      known: The arrays that belong on the host.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(call.values)[0]:
        if not on_host(x) and _described(call, path, x) in known:
            raise ValueError(
                f"{place_of(call.keys, path)} belongs in host memory, and has the type"
                f" of device memory ({jax.typeof(x)}): a restore or a jax.device_put"
                " without a memory kind did that. Put the state back by"
                " paged_optax.place_state(tx, state, params)."
            )


def are_elsewhere(values: PyTree, compiled: jax.stages.Compiled) -> bool:
    """Whether a program is compiled for other places than those of its arguments."""
    leaves, stated = map(jax.tree.leaves, (values, compiled.input_shardings))
    return any(
        place is not None and not place.is_equivalent_to(sharding, jax.typeof(x).ndim)
        for x, sharding in zip(leaves, stated, strict=True)
        for place in [_stated(x)]
    )


def _stated(x: ArrayLike | jax.ShapeDtypeStruct) -> Sharding | None:
    """Where an argument must be; None if JAX may put it anywhere."""
    if is_committed(x) or isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding
    return None


def _described(
    call: Call, path: KeyPath, x: ArrayLike | jax.ShapeDtypeStruct
) -> Described:
    found = jax.typeof(x)
    return place_of(call.keys, path), found.shape, found.dtype


def typed(x: ArrayLike | jax.ShapeDtypeStruct) -> ArrayLike | jax.ShapeDtypeStruct:
    """A `ShapeDtypeStruct` whose memory shows in its type."""
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is None:
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=typed_by_memory(x.sharding))


def device_of(places: PyTree[Sharding]) -> Device:
    """A device of a program, given where its arguments and results are."""
    found = (device for x in jax.tree.leaves(places) for device in x.device_set)
    return next(found, jax.devices()[0])


def placements(
    step: Callable[..., PyTree], args: tuple[PyTree, ...], donated: tuple[int, ...]
) -> tuple[PyTree[Sharding], PyTree[Sharding]]:
    """The shardings of all arguments and of all results, memory kinds among them."""
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)
    committed = map(_stated, jax.tree.leaves(args))
    devices = {d for sharding in committed if sharding for d in sharding.device_set}
    warn_of_host_compute(closed, next(iter(devices), jax.devices()[0]).platform)

    if len(devices) <= 1:
        # Arguments are stated too, also those not committed to a device: JAX pairs an
        # input of unstated memory with any output of its shape.
        device = next(iter(devices), jax.devices()[0])
        alone = lambda x: SingleDeviceSharding(device, memory_kind=memory_kind(x))
        stated = [alone(x) for x in closed.out_avals]
        return jax.tree.map(alone, args), jax.tree.unflatten(structure, stated)
    # Let the compiler choose the layout over devices first, with nothing donated and
    # so nothing to confuse; then state what it chose.
    chosen = jax.jit(step, keep_unused=True).lower(*args).compile()
    place = lambda sharding, x: sharding.with_memory_kind(memory_kind(x))
    inputs = map(place, jax.tree.leaves(chosen.input_shardings), jax.tree.leaves(args))
    inputs = jax.tree.unflatten(jax.tree.structure(args), list(inputs))
    outputs = map(place, jax.tree.leaves(chosen.output_shardings), closed.out_avals)
    outputs = jax.tree.unflatten(structure, list(outputs))
    return inputs, _given_back(args, inputs, shapes, outputs, donated)


def _given_back(
    args: tuple[PyTree, ...],
    inputs: PyTree[Sharding],
    results: PyTree[jax.ShapeDtypeStruct],
    outputs: PyTree[Sharding],
    donated: tuple[int, ...],
) -> PyTree[Sharding]:
    """The results' shardings; a result like a donated argument gets that argument's.

    The compiler may divide updated parameters differently from the given ones. Then no
    buffer could be reused, and the next step would refuse the parameters.
    """
    describe = lambda tree: (
        jax.tree.structure(tree),
        [(x.shape, x.dtype) for x in map(jax.typeof, jax.tree.leaves(tree))],
    )
    left = [(describe(args[i]), inputs[i]) for i in donated]

    def choose(
        result: PyTree[jax.ShapeDtypeStruct], chosen: PyTree[Sharding]
    ) -> PyTree[Sharding]:
        found = next((given for given in left if given[0] == describe(result)), None)
        if found is None:
            return chosen
        left.remove(found)
        return found[1]

    if type(results) in (tuple, list):
        return type(results)(map(choose, results, outputs))
    return choose(results, outputs)
