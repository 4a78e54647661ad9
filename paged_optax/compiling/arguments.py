"""A step's arguments: their names, and what distinguishes one call from another."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import is_mistyped, on_host, typed_by_memory
from paged_optax.backend.text import keystr

#: The position of an argument, or its name if it is passed by name.
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


def signature(step: Callable[..., PyTree]) -> inspect.Signature | None:
    """The signature of a step, not of the function it wraps; None if it has none."""
    try:
        # A wrapper may take other arguments than the function inside.
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


def label(key: ArgumentKey) -> str:
    """The name of an argument in messages."""
    return f"argument {key}"


def leaves_of(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[Leaf]:
    """The leaves of a call's arguments, in JAX's order."""
    leaves = []
    for path, x in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        key = path[1].key if path[0].idx else path[1].idx
        leaves.append(Leaf(key, label(key) + keystr(path[2:]), x))
    return leaves


def places_of(leaves: Iterable[PyTree]) -> tuple[NamedSharding | None, ...]:
    """The shardings of leaves on several devices, None of others; empty if all are."""
    # Each call of a step comes here: no Python function is called for a leaf.
    shardings = [
        x if isinstance(x, NamedSharding) and x.num_devices > 1 else None
        for x in [getattr(x, "sharding", None) for x in leaves]
    ]
    return tuple(shardings) if any(shardings) else ()


class Known(NamedTuple):
    """A leaf of the first arguments that a step was compiled for."""

    aval: ShapedArray
    sharding: Sharding | None

    def has_place_for(self, x: ArrayLike | jax.ShapeDtypeStruct) -> bool:
        """Whether this leaf is in host memory, and `x`, of its type, is not."""
        aval = jax.typeof(x)
        same = (aval.shape, aval.dtype) == (self.aval.shape, self.aval.dtype)
        return same and on_host(self.aval) and not on_host(x)


def refuse_moved(leaves: Sequence[Leaf], before: Mapping[str, Known]) -> None:
    """Raises if an array in device memory belongs in host memory."""
    for _, name, x in leaves:
        known = before.get(name)
        if is_mistyped(x) or (known and known.has_place_for(x)):
            raise ValueError(
                f"{name} belongs in host memory, and has the type of device memory"
                f" ({jax.typeof(x)}): a restore or a jax.device_put without a memory"
                " kind did that. Put the state back by"
                " paged_optax.place_state(tx, state, params)."
            )


def differences(leaves: Sequence[Leaf], before: Mapping[str, Known]) -> list[str]:
    """Differences in structure and type from the first arguments, for messages."""
    argument = lambda name: name.split("[")[0].split(".")[0]
    now = {name: jax.typeof(x) for _, name, x in leaves}
    moved = {argument(name) for name in now.keys() ^ before.keys()}
    if moved:
        every = dict.fromkeys(map(argument, [*before, *now]))
        return [f"{name} of another structure" for name in every if name in moved]
    kind = lambda x: (x.shape, x.dtype, x.weak_type)
    return [
        f"{name} of {was.dtype}{list(was.shape)}"
        for name, (was, _) in before.items()
        if kind(was) != kind(now[name])
    ]


def typed(x: PyTree) -> PyTree:
    """A shape with its memory in its type, as arrays have it; else the same value."""
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is None:
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=typed_by_memory(x.sharding))
