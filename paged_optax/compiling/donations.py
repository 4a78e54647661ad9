"""Where a step's arguments and results are, and whether each donated one is reused."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.interpreters import partial_eval
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import memory_kind, memory_kinds, nbytes
from paged_optax.backend.types import Device, is_committed, is_traced
from paged_optax.compiling.arguments import Keys, label, place_of
from paged_optax.compiling.hlo import aliases
from paged_optax.compiling.host_arithmetic import reaches_host, warn_of_host_compute


def are_elsewhere(values: PyTree, compiled: jax.stages.Compiled) -> bool:
    """Whether a program is compiled for other places than those of its arguments."""
    # JAX moves arguments that are not committed: only the others have a place.
    places = zip(jax.tree.leaves(values), _input_places(compiled, values), strict=True)
    return any(
        place and sharding and not place.is_equivalent_to(sharding, jax.typeof(x).ndim)
        for x, sharding in places
        for place in [_stated(x)]
    )


def _input_places(
    compiled: jax.stages.Compiled, args: tuple[PyTree, ...]
) -> list[Sharding | None]:
    """Where a program has each leaf of its arguments; None: it is not in the program.

    JAX leaves out what nothing uses.
    """
    places, _ = compiled.input_shardings
    return jax.tree.structure(args).flatten_up_to(places)


def _unused_buffers(
    args: tuple[PyTree, ...], donated: tuple[int, ...], used: Sequence[bool]
) -> list[int]:
    """The numbers of donated arrays of which the step uses the buffer alone."""
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    return [
        number
        for number, ((path, x), is_used) in enumerate(zip(leaves, used, strict=True))
        if path[0].idx in donated and not is_used and _has_buffer(x)
    ]


def _has_buffer(x: ArrayLike | jax.ShapeDtypeStruct) -> bool:
    return getattr(x, "size", 0) > 0  # a Python number has none to lose


def with_donated(
    step: Callable[..., PyTree], args: tuple[PyTree, ...], donated: tuple[int, ...]
) -> Callable[..., PyTree]:
    """The step, in whose program each donated buffer is, also one that nothing reads.

    `keep_unused=True` would do as much. But jax 0.11.2 to 0.12.0.1 then keep the
    program for ever, and all that it closes over: their cache of jaxprs without unused
    arguments holds its own key. So such a buffer goes through a barrier, together with
    the smallest array that is read. XLA removes the barrier.
    """
    # JAX promises nothing of it (checked with 0.10.2, 0.11.2 and 0.12.0.1). Without it
    # such a step is compiled twice: see `donates_unused`.
    eliminate = getattr(partial_eval, "dce_jaxpr", None)
    if eliminate is None:
        return step
    closed = jax.make_jaxpr(step)(*args)
    _, used = eliminate(closed.jaxpr, [True] * len(closed.out_avals))
    read = [
        (nbytes(aval), number)
        for number, aval in enumerate(closed.in_avals)
        if used[number]
    ]
    if not read or not (unused := _unused_buffers(args, donated, used)):
        return step
    _, smallest = min(read)
    step = jax.jit(step, inline=True)

    def run(*values: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(values)
        bound = lax.optimization_barrier([leaves[n] for n in (smallest, *unused)])
        leaves[smallest] = bound[0]
        return step(*jax.tree.unflatten(structure, leaves))

    return run


def donates_unused(
    compiled: jax.stages.Compiled, args: tuple[PyTree, ...], donated: tuple[int, ...]
) -> bool:
    """Whether a donated buffer is not in a program, because nothing uses its values."""
    used = [place is not None for place in _input_places(compiled, args)]
    return bool(_unused_buffers(args, donated, used))


def _stated(x: ArrayLike | jax.ShapeDtypeStruct) -> Sharding | None:
    """The sharding that an argument must have; None if JAX may put it anywhere."""
    if is_committed(x) or isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding
    return None


def device_of(places: PyTree[Sharding]) -> Device:
    """One of the devices that arguments and results are on, of this process if any is.

    Of another process's devices nothing can be asked.
    """
    devices = [device for x in jax.tree.leaves(places) for device in x.device_set]
    mine = (x for x in devices if x.process_index == jax.process_index())
    return next(mine, next(iter(devices), jax.devices()[0]))


class Placements(NamedTuple):
    """Where the arguments and results of a step are.

    Attributes:
      inputs: The shardings of all arguments, memory kinds among them.
      outputs: Those of all results.
      travels: Whether anything of the step is in host memory.
    """

    inputs: PyTree[Sharding]
    outputs: PyTree[Sharding]
    travels: bool


def placements(
    step: Callable[..., PyTree], args: tuple[PyTree, ...], donated: tuple[int, ...]
) -> Placements:
    """Where the arguments of a step are, and where its results are to be.

    They are the cure of `jax.jit`'s pairing of donated buffers for a step that is
    compiled here. Where a user compiles it by `jax.jit`, `donate_within_memory` is.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
    structure, travels = jax.tree.structure(shapes), reaches_host(closed)
    committed = map(_stated, jax.tree.leaves(args))
    devices = {d for sharding in committed if sharding for d in sharding.device_set}
    warn_of_host_compute(closed, next(iter(devices), jax.devices()[0]).platform)

    if len(devices) <= 1:
        # Arguments are stated too, also those not committed to a device: JAX pairs an
        # input of unstated memory with any output of its shape (0.10.2 to 0.12.0.1).
        device = next(iter(devices), jax.devices()[0])
        on_device = lambda x: SingleDeviceSharding(device, memory_kind=memory_kind(x))
        stated = [on_device(x) for x in closed.out_avals]
        outputs = jax.tree.unflatten(structure, stated)
        inputs = jax.tree.map(on_device, args)
        return Placements(inputs, outputs, travels)
    # XLA chooses how results are divided. It is asked with nothing donated, so that
    # nothing can be paired wrongly; then its choice is stated.
    chosen = jax.jit(step).lower(*args).compile()
    place = lambda sharding, x: sharding and sharding.with_memory_kind(memory_kind(x))
    # What nothing uses stays where it is.
    leaves = jax.tree.leaves(args)
    places = zip(_input_places(chosen, args), leaves, strict=True)
    inputs = map(place, [known or _stated(x) for known, x in places], leaves)
    inputs = jax.tree.unflatten(jax.tree.structure(args), list(inputs))
    outputs = map(place, jax.tree.leaves(chosen.output_shardings), closed.out_avals)
    outputs = jax.tree.unflatten(structure, list(outputs))
    outputs = _like_donated(args, inputs, shapes, outputs, donated)
    return Placements(inputs, outputs, travels)


def _like_donated(
    args: tuple[PyTree, ...],
    inputs: PyTree[Sharding],
    results: PyTree[jax.ShapeDtypeStruct],
    outputs: PyTree[Sharding],
    donated: tuple[int, ...],
) -> PyTree[Sharding]:
    """The results' shardings; a result like a donated argument gets that argument's.

    XLA may divide updated parameters otherwise than the parameters. Then no buffer
    could be reused, and the next step would refuse the parameters.
    """
    types_of = lambda tree: (
        jax.tree.structure(tree),
        [(x.shape, x.dtype) for x in map(jax.typeof, jax.tree.leaves(tree))],
    )
    left = [(types_of(args[i]), inputs[i]) for i in donated]

    def choose(
        result: PyTree[jax.ShapeDtypeStruct], chosen: PyTree[Sharding]
    ) -> PyTree[Sharding]:
        match = next((pair for pair in left if pair[0] == types_of(result)), None)
        if match is None:
            return chosen
        # Each donated argument gives its place to one result.
        left.remove(match)
        return match[1]

    if type(results) in (tuple, list):
        return type(results)(map(choose, results, outputs))
    return choose(results, outputs)


class DonationError(ValueError):
    """A donated buffer would not be reused."""


def check_donations(
    compiled: jax.stages.Compiled,
    args: tuple[PyTree, ...],
    keys: Keys,
    donated: tuple[int, ...],
) -> None:
    """Raises unless the compiled program reuses every donated buffer."""
    kinds = [
        # A sharding that states no memory kind is of the device's own.
        sharding.memory_kind or memory_kinds()[0]
        for sharding in jax.tree.leaves(compiled.output_shardings)
    ]
    reused = {
        number: kinds[output]
        for number, output in aliases(compiled.as_text() or "").items()
    }
    lost, numbers = [], itertools.count()
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    for (path, leaf), place in zip(leaves, _input_places(compiled, args), strict=True):
        number = next(numbers) if place else None
        # No result in host memory can take over a buffer of the device, nor vice versa.
        is_reused = number is not None and reused.get(number) == memory_kind(leaf)
        if path[0].idx in donated and _has_buffer(leaf) and not is_reused:
            lost.append(f"{place_of(keys, path)} ({jax.typeof(leaf)})")
    if lost:
        raise DonationError(
            f"{len(lost)} donated buffer{'s are' if len(lost) > 1 else ' is'} not"
            f" reused: {', '.join(lost[:3])}. The step must return an array of the same"
            " shape, dtype and memory kind for each donated one; leave the others out"
            " of donate_argnums and donate_argnames."
        )


def note_donated(
    error: BaseException,
    values: tuple[PyTree, ...],
    keys: Keys,
    donated: tuple[int, ...],
) -> None:
    """Notes on a step's error whether its donated arguments are intact."""
    gone = [
        label(keys[i])
        for i in donated
        if any(
            isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted()
            for x in jax.tree.leaves(values[i])
        )
    ]
    if gone:
        error.add_note(
            f"Donated and gone: {', '.join(gone)}. A step that fails consumes them as"
            " one that succeeds does: restore the last checkpoint."
        )
    elif donated:
        error.add_note(
            "Nothing that was donated is gone: the step can be called with it again."
        )
