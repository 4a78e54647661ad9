"""The arguments of a step, and the buffers of the donated ones."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from paged_optax.backend.memory import (
    is_mistyped,
    memory_kind,
    memory_kinds,
    nbytes,
    on_host,
    replicated_sharding,
    typed_by_memory,
)
from paged_optax.backend.text import keystr
from paged_optax.backend.types import Device, is_explicit, is_traced

#: The position of an argument, or its name if it is passed by name.
ArgumentKey = int | str


class Chosen(NamedTuple):
    """The donated or the static arguments of a step, by position and by name."""

    positions: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def create(
        cls,
        step: Callable[..., PyTree],
        positions: int | Iterable[int],
        names: str | Iterable[str] = (),
    ) -> "Chosen":
        """Finds the names of positions and the positions of names.

        `jax.jit` does too, unless both are passed.
        """
        parameters = inspect.signature(step, follow_wrapped=False).parameters.values()
        either = Parameter.POSITIONAL_OR_KEYWORD
        known = [x for x in parameters if x.kind in (Parameter.POSITIONAL_ONLY, either)]
        listed = (positions,) if isinstance(positions, int) else positions
        by_name = {names} if isinstance(names, str) else {*names}
        chosen = {i + len(known) if -len(known) <= i < 0 else i for i in listed}
        chosen |= {i for i, x in enumerate(known) if x.name in by_name}
        by_name |= {
            x.name for i, x in enumerate(known) if i in chosen and x.kind is either
        }
        return cls(tuple(sorted(chosen)), tuple(sorted(by_name)))

    def __contains__(self, key: object) -> bool:
        return key in self.positions or key in self.names

    def select(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> dict[ArgumentKey, PyTree]:
        """These arguments of a call."""
        given = {**dict(enumerate(args)), **kwargs}
        return {key: x for key, x in given.items() if key in self}


class Leaf(NamedTuple):
    """A leaf of a step's arguments."""

    key: ArgumentKey  # the argument that it belongs to
    name: str  # for messages
    value: Any  # an array, a tracer, a Python number or a `ShapeDtypeStruct`


def argument_leaves(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[Leaf]:
    """The leaves of a call's arguments, in JAX's order."""
    leaves = []
    for path, x in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        key = path[1].key if path[0].idx else path[1].idx
        leaves.append(Leaf(key, f"argument {key}{keystr(path[2:])}", x))
    return leaves


def sharding_list(leaves: Iterable[PyTree]) -> tuple[NamedSharding | None, ...]:
    """The shardings of leaves on several devices, None of others; empty if all are."""
    # Runs at each call of a step: no Python function is called for a leaf.
    shardings = [getattr(x, "sharding", None) for x in leaves]
    if NamedSharding not in set(map(type, shardings)):
        return ()
    shardings = [
        x if isinstance(x, NamedSharding) and x.num_devices > 1 else None
        for x in shardings
    ]
    return tuple(shardings) if any(shardings) else ()


def placed_types(leaves: Iterable[Leaf]) -> dict[str, jax.ShapeDtypeStruct]:
    """The types of the leaves that JAX does not move, by name."""
    typed = lambda x: typed_by_memory(x.sharding) if on_host(x) else x.sharding
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=typed(x))
        for _, name, x in leaves
        if is_placed(x) or on_host(x)
    }


def _host_type(
    leaf: Leaf, types: Mapping[str, jax.ShapeDtypeStruct]
) -> jax.ShapeDtypeStruct | None:
    """The type that a leaf of this shape had in host memory, if it was there."""
    before, now = types.get(leaf.name), jax.typeof(leaf.value)
    if before is None or not on_host(before):
        return None
    return before if (before.shape, before.dtype) == (now.shape, now.dtype) else None


def check_not_moved(
    leaves: Iterable[Leaf], types: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    """Raises if an array in device memory belongs in host memory."""
    for leaf in leaves:
        has_left = not on_host(leaf.value) and _host_type(leaf, types) is not None
        if has_left or is_mistyped(leaf.value):
            raise ValueError(
                f"{leaf.name} belongs in host memory, and has the type of device memory"
                f" ({jax.typeof(leaf.value)}): a restore or a jax.device_put without a"
                " memory kind did that. Put the state back by"
                " paged_optax.place_state(tx, state, params), or for stacked layers by"
                " model.place_state."
            )


# JAX promises nothing of it (checked with 0.10.2, 0.11.2 and 0.12.0.1).
_eliminate = getattr(partial_eval, "dce_jaxpr", None)
#: If true, a program keeps the arguments that nothing reads, as a donated buffer must
#: be in it. But jax 0.11.2 to 0.12.0.1 then keep the program for ever, and all that it
#: closes over: their cache of jaxprs without unused arguments holds its own key.
#: `keep_unread` keeps such buffers instead.
KEEP_UNUSED = _eliminate is None


def keep_unread(
    jaxpr: core.ClosedJaxpr, values: list[PyTree], donated: Sequence[bool]
) -> list[PyTree]:
    """The arguments, with donated buffers that the step does not read kept.

    They pass a barrier with the smallest array that is read. XLA removes the barrier.
    """
    if _eliminate is None or not any(donated):
        return values
    avals = [x.aval for x in jaxpr.jaxpr.invars]
    _, used = _eliminate(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    read = [(nbytes(x), n) for n, x in enumerate(avals) if used[n]]
    unread = [n for n, x in enumerate(avals) if donated[n] and not used[n] and x.size]
    if not read or not unread:
        return values
    _, smallest = min(read)
    bound = lax.optimization_barrier([values[n] for n in (smallest, *unread)])
    return [*values[:smallest], bound[0], *values[smallest + 1 :]]


def divide_like(
    results: PyTree, donated: Iterable[tuple[PyTree, Sequence[Sharding | None]]]
) -> PyTree:
    """Divides each result as the donated argument of its structure and types.

    XLA may divide updated parameters differently. No buffer could be reused then, and
    the next step would refuse the parameters.
    """
    types = lambda tree: (
        jax.tree.structure(tree),
        [(x.shape, x.dtype) for x in map(jax.typeof, jax.tree.leaves(tree))],
    )
    left = [(types(value), shardings) for value, shardings in donated if any(shardings)]

    def divide(result: PyTree) -> PyTree:
        for n, (like, shardings) in enumerate(left):
            if like == types(result):
                del left[n]  # each donated argument gives its sharding to one result
                leaves, structure = jax.tree.flatten(result)
                return jax.tree.unflatten(structure, map(_divide, leaves, shardings))
        return result

    if type(results) in (tuple, list):
        return type(results)(map(divide, results))
    return divide(results)


def _divide(x: PyTree, sharding: Sharding | None) -> PyTree:
    if not isinstance(sharding, NamedSharding):
        return x
    if is_explicit(sharding):
        same = jax.typeof(x).sharding.spec == sharding.spec
        return x if same else jax.sharding.reshard(x, sharding)
    if on_host(x):
        return jax.device_put(x, sharding)
    return lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, sharding.spec))


def local_device(shardings: Iterable[Sharding]) -> Device:
    """One of the devices of some shardings, of this process if any is.

    Another process's devices cannot be queried.
    """
    devices = [device for x in shardings for device in x.device_set]
    is_remote = lambda device: device.process_index != jax.process_index()
    return min(devices or jax.devices(), key=is_remote)


def is_placed(x: object) -> bool:
    """True if an argument states its devices, so that JAX does not move it."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is not None
    return getattr(x, "committed", False)


def commit_donated(
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    donated: Chosen,
    types: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """The arguments, with donated arrays committed to the devices of the others.

    A step's results are: `jax.jit` would compile for these, and again for them. `types`
    has those of the first arguments, and moments go where they were.
    """
    # A dict of positions and names has no order, and so is no pytree.
    if all(map(is_placed, jax.tree.leaves([*donated.select(args, kwargs).values()]))):
        return args, kwargs
    leaves = argument_leaves(args, kwargs)
    placed = [x.value for x in leaves if is_placed(x.value)]
    sharding = replicated_sharding(placed or types.values())
    if sharding and len(sharding.device_set) == 1:
        sharding = SingleDeviceSharding(*sharding.device_set)  # as a result's is

    def commit(leaf: Leaf) -> PyTree:
        x = leaf.value
        if leaf.key not in donated or is_placed(x):
            return x
        before = _host_type(leaf, types)
        target = sharding if before is None else before.sharding
        if target is None:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=target)
        return jax.device_put(x, target)  # copies nothing that is there already

    structure = jax.tree.structure((args, kwargs))
    return jax.tree.unflatten(structure, map(commit, leaves))


class DonationError(ValueError):
    """A donated buffer would not be reused."""


def check_donations(
    compiled: jax.stages.Compiled, leaves: Sequence[Leaf], donated: Chosen
) -> None:
    """Raises unless the compiled program reuses every donated buffer."""
    if not any(donated):
        return
    # A sharding without a memory kind is of the device's own memory.
    outputs = jax.tree.leaves(compiled.output_shardings)
    kinds = [sharding.memory_kind or memory_kinds()[0] for sharding in outputs]
    reused = {n: kinds[out] for n, out in aliases(compiled.as_text() or "").items()}
    # None for an argument that nothing uses: JAX leaves it out of the program.
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    lost, index = [], 0
    for (key, name, x), sharding in zip(leaves, shardings, strict=True):
        # No result in host memory can reuse a buffer of the device, nor vice versa.
        is_reused = sharding is not None and reused.get(index) == memory_kind(x)
        index += sharding is not None
        aval = jax.typeof(x)
        # A Python number has no buffer to lose, nor the weakly typed array of one.
        has_buffer = aval.size and not (aval.weak_type and aval.ndim == 0)
        if key in donated and has_buffer and not is_reused:
            lost.append(f"{name} ({aval})")
    if lost:
        raise DonationError(
            f"{len(lost)} donated buffer{'s are' if len(lost) > 1 else ' is'} not"
            f" reused: {', '.join(lost[:3])}. The step must return an array of the same"
            " shape, dtype and memory kind for each donated one, NNX modules too that"
            " it changes; leave the others out of donate_argnums and donate_argnames."
        )


def aliases(hlo: str) -> dict[int, int]:
    """The output that reuses each donated argument, by the argument's number.

    The tokens that order effects are not counted: they precede arrays in both.
    """
    # Aliases stand before the first computation, and a blank line between them.
    header = hlo[: hlo.find("\n\n")]
    types = header.partition("entry_computation_layout={(")[2].partition(")->")[0]
    tokens = types.count("token[]")
    match = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", header)
    pairs = re.findall(r"\{(\d*)\}: \((\d+),", match[1] if match else "")
    return {int(x) - tokens: int(output or 0) - tokens for output, x in pairs}


def note_donated(error: BaseException, donated: Mapping[ArgumentKey, PyTree]) -> None:
    """Notes on a step's error whether its donated arguments are intact."""
    is_gone = lambda x: isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted()
    any_gone = lambda tree: any(map(is_gone, jax.tree.leaves(tree)))
    if gone := [f"argument {key}" for key, x in donated.items() if any_gone(x)]:
        error.add_note(
            f"Donated and gone: {', '.join(gone)}. Donated arguments are consumed even"
            " if the step fails: restore the last checkpoint."
        )
    elif donated:
        error.add_note(
            "No donated argument is gone: the step can be called with it again."
        )
