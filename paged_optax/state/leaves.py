"""A state's leaves, each with its parameter and field, and parameters by path.

Everything is read off the state itself: its structure says which leaf is whose moment,
its arrays' memory kinds say where each lives. Where the parameters are known,
`paged_optax.transform.trees` says whose.

A path is `"blocks/0/attn/q/kernel"`, or JAX's key path. A path that leads to a group of
parameters names all of them; functions of one parameter take it where the group has one
member (Flax's `.../kernel/value`).

A string is the keys joined by `/`. Keys may have a `/` themselves, so that a string may
name several parameters or groups: then it is refused, and only a key path tells them
apart. A `/` at its ends is ignored if no key begins or ends so.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator

import jax
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import as_pure
from paged_optax.backend.memory import on_host
from paged_optax.backend.text import key_names, keystr, path_name
from paged_optax.backend.types import (
    ArrayOrShape,
    KeyPath,
    Path,
    counts_steps,
    holds_moments,
)
from paged_optax.backend.validation import check_arrays
from paged_optax.codecs import Quantized

#: What `optax.inject_hyperparams` keeps beside moments: trees of settings.
SETTINGS = ("hyperparams", "hyperparams_states")

#: Fields of the parameters' structure that no parameter's update reads and writes: the
#: accumulators of `optax.MultiSteps` stay on the device.
_NO_MOMENTS = (*SETTINGS, "acc_grads")

#: Fields of Optax's states. A dict that has them, and no state, is a restored one.
_FIELDS = frozenset(
    "count inner_state inner_states mu nu step sum_of_squares trace v_row".split()
)

#: The names of the keys of a leaf's node, its field, those of its parameter.
LeafKey = tuple[tuple[str, ...], str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf of a state.

    Attributes:
      node: The path of the Optax state it belongs to.
      field: The name of its field there: `"mu"`, `"count"`.
      parameter: The path of its parameter; `()` where it is not in a tree of them.
      value: The array, or what a codec stores in its place.
    """

    node: KeyPath
    field: str
    parameter: KeyPath
    value: PyTree[ArrayOrShape]

    @property
    def key(self) -> LeafKey:
        """What it is called in any state of its transformation."""
        return key_names(self.node), self.field, key_names(self.parameter)

    @property
    def name(self) -> str:
        """Its parameter, for messages."""
        return path_name(self.parameter)

    @property
    def is_moment(self) -> bool:
        """Whether an update reads and writes it, beside its parameter."""
        if isinstance(self.value, Quantized):
            return True
        if self.field in _NO_MOMENTS:
            return False
        if not holds_moments(self.value.dtype):
            return False
        return bool(self.parameter) or self.value.ndim > 0

    @property
    def is_count(self) -> bool:
        """Whether it counts steps."""
        if isinstance(self.value, Quantized) or self.field in SETTINGS:
            return False
        return self.value.ndim == 0 and counts_steps(self.value.dtype)

    @property
    def place(self) -> tuple[KeyPath, str]:
        """Its node and field, which the same moment of other parameters has too."""
        return self.node, self.field


def _is_state(node: PyTree) -> bool:
    """Whether a node is an Optax state, or a container of such."""
    # Optax's states are named tuples called `...State`; what they hold in their fields
    # is trees of the parameters' structure, which may be of any type.
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node).__name__.endswith("State")
    if isinstance(node, (tuple, list)):
        return any(map(_is_state, node))
    return isinstance(node, dict) and any(map(_is_state, node.values()))


def _holds_states(node: PyTree, path: KeyPath) -> bool:
    """Whether a child of a state may be a state itself."""
    # Optax says so in the field's name (`inner_state`, `fast_state`). All others are
    # trees of parameters, which may have a name that ends in `State` too.
    by_optax = type(node).__module__.partition(".")[0] in ("optax", "paged_optax")
    return not (by_optax and hasattr(node, "_fields")) or "state" in path[0].name


def is_quantized(node: PyTree) -> bool:
    """Whether a node of a state is one moment, stored in several arrays."""
    return isinstance(node, Quantized)


def state_fields(node: PyTree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, PyTree]]:
    """The fields of all Optax states inside: paths, and what they hold."""
    if not _is_state(node):
        yield path, node
        return
    for key_path, child in jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )[0]:
        if _holds_states(node, key_path):
            yield from state_fields(child, (*path, *key_path))
        else:
            yield (*path, *key_path), child


def _names_of(state: PyTree) -> set[str]:
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {name for path, _ in flat for name in key_names(path)}


def state_leaves_of(state: PyTree, *, shapes: bool = True) -> list[StateLeaf]:
    """The leaves of a state, in order; `shapes`: `ShapeDtypeStruct`s will do."""
    check_arrays("state", state, shapes=shapes)
    fields = [*state_fields(state)]
    bare = isinstance(state, (dict, list)) and not any(x for x, _ in fields)
    if bare and not _FIELDS.isdisjoint(_names_of(state)):
        raise ValueError(
            f"state is a {type(state).__name__} without Optax's states inside, as a"
            " restore without a target makes it: put it into their containers first,"
            " by paged_optax.place_state(tx, state, params)."
        )
    return [
        StateLeaf(path[:-1], path_name(path[-1:]), key_path, as_pure(value))
        for path, field in fields
        for key_path, value in _flat(field)
    ]


def _flat(field: PyTree) -> list[tuple[KeyPath, PyTree]]:
    """A field's moments and arrays, each with its path, that of its variable."""
    if jax.tree_util.all_leaves([as_pure(field)], is_leaf=is_quantized):
        return [((), field)]  # a count, in a variable or not
    flat = jax.tree_util.tree_flatten_with_path(field, is_leaf=is_quantized)[0]
    boxed = lambda x: (
        is_quantized(x) and jax.tree.structure(x) != jax.tree.structure(as_pure(x))
    )
    value = jax.tree_util.GetAttrKey("value")
    return [((*path, value) if boxed(x) else path, x) for path, x in flat]


def unpaged_places(state_leaves: Iterable[StateLeaf]) -> set[tuple[KeyPath, str]]:
    """Fields that nothing pages, as that of an `optax.trace` beside `paged(...)`."""
    # Moments of a parameter move together, so a field without a single moment on the
    # host, although other moments of its parameters are there, is not paged.
    moments = [leaf for leaf in state_leaves if leaf.is_moment]
    paged = {leaf.place for leaf in moments if on_host(leaf.value)}
    away = {leaf.parameter for leaf in moments if on_host(leaf.value)}
    return {leaf.place for leaf in moments if leaf.parameter in away} - paged


class Parameters:
    """Parameters, to be found by paths."""

    def __init__(self, paths: Iterable[KeyPath], where: str):
        """Takes their paths; `where` is what has them, for messages."""
        self.where = where
        self.names: dict[KeyPath, str] = {}
        self.groups: dict[tuple[str, ...], list[KeyPath]] = {}
        self.joined: dict[str, set[tuple[str, ...]]] = {}
        for path in dict.fromkeys(paths):
            self.names[path] = path_name(path)
            for n in range(len(path) + 1):
                self.groups.setdefault(key_names(path[:n]), []).append(path)
                self.joined.setdefault(path_name(path[:n]), set()).add(
                    key_names(path[:n])
                )

    def named_by(self, path: Path) -> list[KeyPath]:
        """Those that a path names: one, or a group."""
        if isinstance(path, tuple):
            group = self.groups.get(key_names(path), [])
        elif isinstance(path, str):
            group = self._named_by_text(path)
        else:
            raise TypeError(
                f"path={path!r} is no path: pass one such as 'blocks/0/kernel', or"
                " JAX's keys."
            )
        if group:
            return group
        wanted, names = path_name(path), list(self.names.values())
        close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(
            f"path={wanted!r}: {self.where} has no such parameter. Close names:"
            f" {', '.join(map(repr, close)) or 'none, it has no parameters'}."
        )

    def _named_by_text(self, text: str) -> list[KeyPath]:
        for each in (text, text.strip("/")):
            groups = {
                tuple(self.groups[keys]): str(self.groups[keys][0][: len(keys)])
                for keys in self.joined.get(each, ())
            }
            if len(groups) > 1:
                raise ValueError(
                    f"path={text!r} names {len(groups)} parameters or groups, whose"
                    " keys joined by '/' are equal: pass the keys of one as JAX has"
                    f" them, {' or '.join(sorted(groups.values()))}, where DictKey"
                    " and its like are those of jax.tree_util."
                )
            for group in groups:
                return list(group)
        # A group whose names were joined before, as by Flax's `flatten_dict`.
        begins = tuple({f"{text}/", f"{text.strip('/')}/"})
        return [path for path, name in self.names.items() if name.startswith(begins)]


def parameter_at(path: Path, state_leaves: Iterable[StateLeaf]) -> KeyPath:
    """The one parameter that a path names."""
    paths = [leaf.parameter for leaf in state_leaves if leaf.is_moment]
    group = Parameters(paths, "the state").named_by(path)
    if len(group) > 1:
        names = [path_name(each) for each in group]
        labels = [
            repr(name) if names.count(name) == 1 else str(each)
            for name, each in zip(names, group, strict=True)
        ]
        more = ["..."] if len(group) > 3 else []
        raise ValueError(
            f"path={path_name(path).strip('/')!r} leads to {len(group)} parameters"
            f" ({', '.join(labels[:3] + more)}): name one."
        )
    return group[0]


def moments_at(state: PyTree, path: Path) -> dict[str, tuple[int, StateLeaf]]:
    """One parameter's moments by name, with their positions in the state."""
    state_leaves = state_leaves_of(state)
    parameter = parameter_at(path, state_leaves)
    moments = [
        (position, leaf)
        for position, leaf in enumerate(state_leaves)
        if leaf.is_moment and leaf.parameter == parameter
    ]
    names = [leaf.field for _, leaf in moments]
    # Where two fields have one name, the path to the field comes before it.
    for spelled in (path_name, keystr):
        names = [
            name if names.count(name) == 1 else f"{spelled(leaf.node)}/{leaf.field}"
            for name, (_, leaf) in zip(names, moments, strict=True)
        ]
    return dict(zip(names, moments, strict=True))


def moments_within(state: PyTree, path: Path) -> list[StateLeaf]:
    """The moments of a parameter, or of a group."""
    state_leaves = [leaf for leaf in state_leaves_of(state) if leaf.is_moment]
    paths = [leaf.parameter for leaf in state_leaves]
    inside = set(Parameters(paths, "the state").named_by(path))
    return [leaf for leaf in state_leaves if leaf.parameter in inside]


def arrays_at(state: PyTree, path: Path | None) -> list[ArrayOrShape]:
    """The arrays of a parameter's moments, or of a group's; None: all arrays."""
    check_arrays("state", state)
    if path is None:
        return jax.tree.leaves(state)
    return jax.tree.leaves([leaf.value for leaf in moments_within(state, path)])
