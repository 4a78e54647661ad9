"""The arguments of a step: their leaves, the names of these, and their types."""

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import is_mistyped, on_host
from paged_optax.backend.text import keystr

#: The position of an argument, or its name if it is passed by name.
ArgumentKey = int | str


def signature_of(step: Callable[..., PyTree]) -> inspect.Signature:
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
    def of(
        cls,
        step: Callable[..., PyTree],
        positions: int | Iterable[int],
        names: str | Iterable[str] = (),
    ) -> "Chosen":
        """Finds the names of positions and the positions of names, as `jax.jit` does.

        `jax.jit` does not if both are passed.
        """
        parameters = signature_of(step).parameters.values()
        kinds = (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.POSITIONAL_ONLY,
        )
        known = [
            x.name if x.kind == kinds[0] else "" for x in parameters if x.kind in kinds
        ]
        chosen = (
            [positions]
            if isinstance(positions, int)
            else map(operator.index, positions)
        )
        chosen = {i + len(known) if -len(known) <= i < 0 else i for i in chosen}
        by_name = {names} if isinstance(names, str) else {*names}
        by_name |= {name for i, name in enumerate(known) if name and i in chosen}
        chosen |= {i for i, name in enumerate(known) if name in by_name}
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
    """A leaf of a step's arguments.

    Attributes:
      key: The argument that it belongs to.
      name: Its name in messages.
      value: An array, a tracer, a Python number or a `ShapeDtypeStruct`.
    """

    key: ArgumentKey
    name: str
    value: Any


def leaves_of(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[Leaf]:
    """The leaves of a call's arguments, in JAX's order."""
    leaves = []
    for path, x in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        key = path[1].key if path[0].idx else path[1].idx
        leaves.append(Leaf(key, f"argument {key}{keystr(path[2:])}", x))
    return leaves


def places_of(leaves: Iterable[PyTree]) -> tuple[NamedSharding | None, ...]:
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


class FirstLeaf(NamedTuple):
    """A leaf of the first arguments that a step was compiled for."""

    aval: ShapedArray
    sharding: Sharding | None

    def has_place_for(self, x: ArrayLike | jax.ShapeDtypeStruct) -> bool:
        """True if this leaf is in host memory, and `x`, of its type, is not."""
        aval = jax.typeof(x)
        same = (aval.shape, aval.dtype) == (self.aval.shape, self.aval.dtype)
        return same and on_host(self.aval) and not on_host(x)


def refuse_moved(leaves: Iterable[Leaf], first: Mapping[str, FirstLeaf]) -> None:
    """Raises if an array in device memory belongs in host memory."""
    for _, name, x in leaves:
        before = first.get(name)
        if is_mistyped(x) or (before and before.has_place_for(x)):
            raise ValueError(
                f"{name} belongs in host memory, and has the type of device memory"
                f" ({jax.typeof(x)}): a restore or a jax.device_put without a memory"
                " kind did that. Put the state back by"
                " paged_optax.place_state(tx, state, params)."
            )


def differences(leaves: Iterable[Leaf], first: Mapping[str, FirstLeaf]) -> list[str]:
    """Differences in structure and type from the first arguments, for messages."""
    now = {name: jax.typeof(x) for _, name, x in leaves}
    argument = lambda name: re.split(r"[\[.]", name)[0]
    if moved := {argument(name) for name in now.keys() ^ first.keys()}:
        return [f"{name} of another structure" for name in sorted(moved)]
    kind = lambda x: (x.shape, x.dtype, x.weak_type)
    return [
        f"{name} of {aval.dtype}{list(aval.shape)}"
        for name, (aval, _) in first.items()
        if kind(aval) != kind(now[name])
    ]
