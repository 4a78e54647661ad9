"""A step's arguments: their names, their memory, and whether they may be donated."""

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Set
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import (
    is_mistyped,
    memory_kind,
    memory_kinds,
    on_host,
    typed_by_memory,
)
from paged_optax.backend.text import keystr
from paged_optax.backend.types import (
    Device,
    KeyPath,
    PyTreeDef,
    is_committed,
    is_traced,
)
from paged_optax.compiling.hlo import aliases
from paged_optax.compiling.host_arithmetic import reaches_host, warn_of_host_compute

#: The position of an argument, or the name of one that has none.
ArgumentKey = int | str

Keys = tuple[ArgumentKey, ...]


def several(keys: ArgumentKey | Iterable[ArgumentKey]) -> Keys:
    """One position or name, or several, each once."""
    if isinstance(keys, int | str):
        return (keys,)
    unique = tuple(dict.fromkeys(keys)) if isinstance(keys, Iterable) else (keys,)
    for key in unique:
        if not isinstance(key, int | str):
            raise TypeError(
                f"{key!r} names no argument: pass positions in donate_argnums and"
                " static_argnums, and names in donate_argnames."
            )
    return unique


def label(key: ArgumentKey) -> str:
    """An argument, as messages name it."""
    return f"argument {key}"


def signature(step: Callable[..., PyTree]) -> inspect.Signature | None:
    """The signature of a step, not of what it wraps; None if it has none."""
    try:
        # A wrapper may take other arguments than what it wraps.
        return inspect.signature(step, follow_wrapped=False)
    except ValueError:
        return None


def names_by_position(signature: inspect.Signature | None) -> list[str]:
    """The names of arguments that have a position; `""` for one without a name."""
    every = signature.parameters.values() if signature else ()
    named, bare = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    )
    return [x.name if x.kind == named else "" for x in every if x.kind in (named, bare)]


class Call(NamedTuple):
    """What a step is called with.

    Attributes:
      keys: The arguments that are arrays.
      values: Their values.
      static: Those that are not, and their values.
    """

    keys: Keys
    values: tuple[PyTree, ...]
    static: dict[ArgumentKey, Hashable]

    @property
    def kind(self) -> "CallKind":
        """What a program is compiled for, beside the places of arrays."""
        leaves, structure = jax.tree.flatten(self.values)
        # By itself `jax.typeof` takes milliseconds of each call for 1000 arrays.
        types = [getattr(x, "aval", None) or jax.typeof(x) for x in leaves]
        static = {key: (type(x), x) for key, x in self.static.items()}
        return CallKind(
            self.keys,
            static,
            structure,
            [(x.shape, x.dtype, x.weak_type) for x in types],
        )


class CallKind(NamedTuple):
    """A kind of calls that share a program.

    `jax.jit` tells the same kinds apart: 1, 1.0 and True are three constants, and an
    array of a strong type is no Python number.

    Attributes:
      keys: The arguments that are arrays.
      static: The types and values of the others.
      structure: The tree of the arrays.
      types: Their shapes and dtypes, and whether the dtypes are weak.
    """

    keys: Keys
    static: dict[ArgumentKey, tuple[type, Hashable]]
    structure: PyTreeDef
    types: list[tuple[tuple[int, ...], np.dtype, bool]]


def differences(call: Call, kind: CallKind) -> list[str]:
    """Where a call is of another structure or type than a program, for messages."""
    actual, arguments = call.kind, zip(call.keys, call.values, strict=True)
    if actual.keys != kind.keys:
        return list(map(label, kind.keys))
    others = [
        f"{label(key)} of another structure"
        for (key, value), wanted in zip(
            arguments, kind.structure.children(), strict=True
        )
        if jax.tree.structure(value) != wanted
    ]
    if others:
        return others
    flat = jax.tree_util.tree_flatten_with_path(call.values)[0]
    return [
        f"{place_of(call.keys, path)} of {dtype}{list(shape)}"
        for (path, _), type_, (shape, dtype, weak) in zip(
            flat, actual.types, kind.types, strict=True
        )
        if type_ != (shape, dtype, weak)
    ]


def place_of(keys: Keys, path: KeyPath) -> str:
    """A leaf of the arguments, as messages name it."""
    return f"{label(keys[path[0].idx])}{keystr(path[1:])}"


#: An array among the arguments, as messages name it; its shape and its dtype.
ArrayKey = tuple[str, tuple[int, ...], object]


def hosted(call: Call) -> set[ArrayKey]:
    """The arrays of a call that belong in host memory."""
    return {
        _array_key(call, path, x)
        for path, x in jax.tree_util.tree_flatten_with_path(call.values)[0]
        # One that is mistyped is in host memory, whatever its type says.
        if on_host(x) or is_mistyped(x)
    }


def refuse_moved(call: Call, known: Set[ArrayKey]) -> None:
    """Refuses arrays that are typed as device memory and belong on the host."""
    for path, x in jax.tree_util.tree_flatten_with_path(call.values)[0]:
        if not on_host(x) and _array_key(call, path, x) in known:
            raise ValueError(
                f"{place_of(call.keys, path)} belongs in host memory, and has the type"
                f" of device memory ({jax.typeof(x)}): a restore or a jax.device_put"
                " without a memory kind did that. Put the state back by"
                " paged_optax.place_state(tx, state, params)."
            )


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


def _is_donated(path: KeyPath, leaf: ArrayLike, donated: tuple[int, ...]) -> bool:
    # A Python number has no buffer to lose.
    return path[0].idx in donated and bool(getattr(leaf, "size", 0))


def donates_unused(
    compiled: jax.stages.Compiled, args: tuple[PyTree, ...], donated: tuple[int, ...]
) -> bool:
    """Whether a donated buffer is not in a program, because nothing uses its values."""
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    places = _input_places(compiled, args)
    return any(
        place is None and _is_donated(path, leaf, donated)
        for (path, leaf), place in zip(leaves, places, strict=True)
    )


def _stated(x: ArrayLike | jax.ShapeDtypeStruct) -> Sharding | None:
    """The sharding that an argument must have; None if JAX may put it anywhere."""
    if is_committed(x) or isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding
    return None


def _array_key(
    call: Call, path: KeyPath, x: ArrayLike | jax.ShapeDtypeStruct
) -> ArrayKey:
    aval = jax.typeof(x)
    return place_of(call.keys, path), aval.shape, aval.dtype


def typed(x: ArrayLike | jax.ShapeDtypeStruct) -> ArrayLike | jax.ShapeDtypeStruct:
    """The shape with its memory in its type, as arrays have it."""
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is None:
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=typed_by_memory(x.sharding))


def device_of(places: PyTree[Sharding]) -> Device:
    """One of the devices that arguments and results are on, of this process if any is.

    Of another process's devices nothing can be asked.
    """
    devices = [device for x in jax.tree.leaves(places) for device in x.device_set]
    mine = (x for x in devices if x.process_index == jax.process_index())
    return next(mine, next(iter(devices), jax.devices()[0]))


def placements(
    step: Callable[..., PyTree], args: tuple[PyTree, ...], donated: tuple[int, ...]
) -> tuple[PyTree[Sharding], PyTree[Sharding], bool]:
    """The shardings of all arguments and of all results, memory kinds among them.

    And whether anything of the step is in host memory.

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
        return jax.tree.map(on_device, args), outputs, travels
    # XLA chooses how results are divided. It is asked with nothing donated, so that
    # nothing can be paired wrongly; then its choice is stated.
    chosen = jax.jit(step).lower(*args).compile()

    def place(
        sharding: Sharding | None, x: ArrayLike | jax.ShapeDtypeStruct
    ) -> Sharding | None:
        # What nothing uses stays where it is.
        sharding = sharding or _stated(x)
        return sharding and sharding.with_memory_kind(memory_kind(x))

    inputs = map(place, _input_places(chosen, args), jax.tree.leaves(args))
    inputs = jax.tree.unflatten(jax.tree.structure(args), list(inputs))
    outputs = map(place, jax.tree.leaves(chosen.output_shardings), closed.out_avals)
    outputs = jax.tree.unflatten(structure, list(outputs))
    return inputs, _like_donated(args, inputs, shapes, outputs, donated), travels


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
        if _is_donated(path, leaf, donated) and not is_reused:
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
