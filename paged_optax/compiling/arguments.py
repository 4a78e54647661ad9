"""The arguments of a step: their leaves, the names of these, and their types."""

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from paged_optax.backend.memory import is_mistyped, on_host, typed_by_memory
from paged_optax.backend.text import keystr

#: The position of an argument, or its name if it is passed by name.
ArgumentKey = int | str


def get_signature(step: Callable[..., PyTree]) -> inspect.Signature:
    """The signature of a step, and not of a function that it wraps."""
    try:
        return inspect.signature(step, follow_wrapped=False)
    except ValueError:  # a function of C
        return inspect.signature(lambda *args, **kwargs: None)


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
        parameters = get_signature(step).parameters.values()
        only, either = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
        known = [x.name for x in parameters if x.kind in (only, either)]
        named = [x.name for x in parameters if x.kind is either]
        subset = (positions,) if isinstance(positions, int) else positions
        subset = map(operator.index, subset)
        subset = {i + len(known) if -len(known) <= i < 0 else i for i in subset}
        by_name = {names} if isinstance(names, str) else {*names}
        by_name |= {x for i, x in enumerate(known) if i in subset and x in named}
        subset |= {i for i, x in enumerate(known) if x in by_name}
        return cls(tuple(sorted(subset)), tuple(sorted(by_name)))

    def __contains__(self, key: object) -> bool:
        return key in self.positions or key in self.names

    def select(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> dict[ArgumentKey, PyTree]:
        """These arguments of a call."""
        given = {**dict(enumerate(args)), **kwargs}
        return {key: x for key, x in given.items() if key in self}


class Leaf(NamedTuple):
    """A leaf of a step's arguments.

    Attributes:
      key: The argument that it belongs to.
      name: Its name in messages.
      value: An array, a tracer, a Python number or a `ShapeDtypeStruct`.
    """

    key: ArgumentKey
    name: str
    value: Any


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


def host_types(leaves: Iterable[Leaf]) -> dict[str, jax.ShapeDtypeStruct]:
    """The types of the leaves in host memory, by name."""
    return {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=typed_by_memory(x.sharding)
        )
        for _, name, x in leaves
        if on_host(x) and getattr(x, "sharding", None) is not None
    }


def host_type(
    leaf: Leaf, types: Mapping[str, jax.ShapeDtypeStruct]
) -> jax.ShapeDtypeStruct | None:
    """The type that a leaf outside host memory had there, if it has its shape."""
    before, now = types.get(leaf.name), jax.typeof(leaf.value)
    if before is None or on_host(leaf.value):
        return None
    return before if (before.shape, before.dtype) == (now.shape, now.dtype) else None


def check_not_moved(
    leaves: Iterable[Leaf], types: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    """Raises if an array in device memory belongs in host memory."""
    for leaf in leaves:
        if is_mistyped(leaf.value) or host_type(leaf, types):
            raise ValueError(
                f"{leaf.name} belongs in host memory, and has the type of device memory"
                f" ({jax.typeof(leaf.value)}): a restore or a jax.device_put without a"
                " memory kind did that. Put the state back by"
                " paged_optax.place_state(tx, state, params)."
            )
