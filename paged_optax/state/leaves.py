"""Leaves of an optimizer state, with their parameters and fields.

Optax keeps moments in trees of the parameters' structure, in the fields of named tuples
called `...State`. The structure alone therefore gives each leaf its parameter; where
the parameters are at hand, `paged_optax.transform.trees` compares paths instead.

A path is `"blocks/0/attn/q/kernel"`, the keys joined by `/`, or JAX's key path, with or
without the `value` of a Flax variable. It may lead to a group of parameters; functions
of one parameter accept a group of one. A string that several groups match is refused:
keys may contain `/`, and only key paths are unique.
"""

import collections
import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from itertools import takewhile

from jax import Array
from jaxtyping import Int, PyTree

from paged_optax.backend.flax_variables import as_pure
from paged_optax.backend.memory import on_host
from paged_optax.backend.text import key_names, path_name
from paged_optax.backend.types import (
    ArrayOrShape,
    KeyPath,
    Path,
    counts_steps,
    holds_moments,
)
from paged_optax.backend.validation import check_arrays
from paged_optax.codecs import Quantized
from paged_optax.transform.trees import leaf_paths

#: Trees of settings that `optax.inject_hyperparams` keeps.
SETTINGS = ("hyperparams", "hyperparams_states")

#: Fields of the parameters' structure without moments: the accumulators of
#: `optax.MultiSteps` stay on the device.
_NO_MOMENTS = (*SETTINGS, "acc_grads")

#: Fields of Optax's states, as keys of a restored dict.
_FIELDS = frozenset(
    "count inner_state inner_states mu nu step sum_of_squares trace v_row".split()
)

#: The names of the keys of a leaf's node, its field, those of its parameter.
LeafKey = tuple[tuple[str, ...], str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf of a state."""

    node: KeyPath  # the path of its Optax state
    field: str  # the name of its field there: `"mu"`, `"count"`
    parameter: KeyPath  # `()` outside the parameters' structure
    value: PyTree[ArrayOrShape]  # the array, or those in which a codec stores it

    @property
    def key(self) -> LeafKey:
        """The leaf's names, whatever containers the state has."""
        return key_names(self.node), self.field, key_names(self.parameter)

    @property
    def name(self) -> str:
        """The parameter's path, for messages."""
        return path_name(self.parameter)

    @property
    def is_moment(self) -> bool:
        """True if an update reads and writes the leaf with its parameter."""
        if isinstance(self.value, Quantized):
            return True
        if self.field in _NO_MOMENTS or not holds_moments(self.value.dtype):
            return False
        return bool(self.parameter) or self.value.ndim > 0

    @property
    def is_count(self) -> bool:
        """True if the leaf counts steps."""
        if isinstance(self.value, Quantized) or self.field in SETTINGS:
            return False
        return self.value.ndim == 0 and counts_steps(self.value.dtype)


def is_quantized(node: PyTree) -> bool:
    """Returns whether a node is a moment that a codec stores in several arrays."""
    return isinstance(node, Quantized)


def _is_state(node: PyTree) -> bool:
    """Returns whether a node is an Optax state, or a container of states."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node).__name__.endswith("State")
    if isinstance(node, (tuple, list)):
        return any(map(_is_state, node))
    return isinstance(node, dict) and any(map(_is_state, node.values()))


def _holds_states(node: PyTree, path: KeyPath) -> bool:
    # Optax's fields of states have names such as `inner_state`. Other fields are trees
    # of parameters, whose containers may be called `...State` too.
    by_optax = type(node).__module__.partition(".")[0] in ("optax", "paged_optax")
    return not (by_optax and hasattr(node, "_fields")) or "state" in path[0].name


def state_fields(node: PyTree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, PyTree]]:
    """Yields the fields of all Optax states inside, with their paths."""
    if not _is_state(node):
        yield path, node
        return
    children = leaf_paths(node, lambda x: x is not node)
    for key_path, child in zip(*children, strict=True):
        if _holds_states(node, key_path):
            yield from state_fields(child, (*path, *key_path))
        else:
            yield (*path, *key_path), child


def state_leaves_of(state: PyTree, *, shapes: bool = True) -> list[StateLeaf]:
    """Returns the leaves of a state in order; `shapes` admits `ShapeDtypeStruct`s."""
    check_arrays("state", state, shapes=shapes)
    fields = [*state_fields(as_pure(state))]
    if isinstance(state, (dict, list)) and not any(path for path, _ in fields):
        if any(not _FIELDS.isdisjoint(key_names(x)) for x in leaf_paths(state)[0]):
            raise ValueError(
                f"state is a {type(state).__name__} without Optax's states inside, as a"
                " restore without a target makes it: put it into their containers"
                " first, by paged_optax.place_state(tx, state, params)."
            )
    return [
        StateLeaf(path[:-1], path_name(path[-1:]), parameter, value)
        for path, field in fields
        for parameter, value in zip(*leaf_paths(field, is_quantized), strict=True)
    ]


def pageable(state_leaves: Iterable[StateLeaf]) -> list[bool]:
    """Returns for each leaf whether it is a moment that `paged` may move.

    A field without any moment on the host, such as the trace of an `optax.trace`
    outside `paged`, stays on the device although its parameters' other moments are
    paged.
    """
    state_leaves = list(state_leaves)
    moments = [x for x in state_leaves if x.is_moment]
    paged = [x for x in moments if on_host(x.value)]
    params = {x.parameter for x in paged}
    fields = {(x.node, x.field) for x in paged}
    stay = {(x.node, x.field) for x in moments if x.parameter in params} - fields
    return [x.is_moment and (x.node, x.field) not in stay for x in state_leaves]


class Parameters:
    """Parameters, indexed by the paths of their groups; `where` is for messages."""

    def __init__(self, paths: Iterable[KeyPath], where: str = "the state"):
        self._where, self._paths = where, [*dict.fromkeys(paths)]
        self._groups = collections.defaultdict[tuple[str, ...], list[KeyPath]](list)
        for path in self._paths:
            names = key_names(path)
            for n in range(len(names) + 1):
                self._groups[names[:n]].append(path)

    def group(self, path: Path) -> list[KeyPath]:
        """Returns the parameters that a path leads to; raises if there are none."""
        if isinstance(path, tuple):
            names = key_names(path)
            group = self._groups.get(names) or (
                self._groups.get(names[:-1]) if names[-1:] == ("value",) else None
            )
        else:
            group = self._matching(path) or self._matching(path.removesuffix("/value"))
        if group:
            return group
        names = [*map(path_name, self._paths)]
        close = difflib.get_close_matches(path_name(path), names, n=3, cutoff=0.3)
        close = ", ".join(map(repr, close or names[:3]))
        raise ValueError(
            f"path={path_name(path)!r}: {self._where} has no such parameter. Close"
            f" names: {close or 'none, it has no parameters'}."
        )

    def one(self, path: Path) -> KeyPath:
        """Returns the parameter that a path leads to; raises if there are several."""
        group = self.group(path)
        if len(group) == 1:
            return group[0]
        names = ", ".join([repr(path_name(x)) for x in group[:3]])
        more = ", ..." if len(group) > 3 else ""
        raise ValueError(
            f"path={path_name(path).strip('/')!r} leads to {len(group)} parameters"
            f" ({names}{more}): name one."
        )

    def _matching(self, path: str) -> list[KeyPath]:
        for text in (path, path.strip("/")):
            matches = {
                tuple(group): str(group[0][: len(names)])
                for names, group in self._groups.items()
                if "/".join(names) == text
            }
            if len(matches) > 1:
                raise ValueError(
                    f"path={path!r} names {len(matches)} parameters or groups, whose"
                    " keys joined by '/' are equal: pass the keys of one as JAX has"
                    f" them, {' or '.join(sorted(matches.values()))}, where DictKey"
                    " and its like are those of jax.tree_util."
                )
            for group in matches:
                return list(group)
        # Groups in names joined before, as by Flax's `flatten_dict`.
        begins = f"{path}/", f"{path.strip('/')}/"
        return [x for x in self._paths if path_name(x).startswith(begins)]


def parameters_of(state_leaves: Iterable[StateLeaf]) -> Parameters:
    """Returns the parameters that have moments."""
    return Parameters(x.parameter for x in state_leaves if x.is_moment)


def moments_within(state: PyTree, path: Path) -> list[StateLeaf]:
    """Returns the moments of a parameter, or of a group."""
    state_leaves = state_leaves_of(state)
    inner = set(parameters_of(state_leaves).group(path))
    return [x for x in state_leaves if x.is_moment and x.parameter in inner]


def read_step(
    state_leaves: Iterable[StateLeaf], parameter: KeyPath
) -> Int[Array, ""] | None:
    """Returns the step count of a parameter, its own or a shared one, or None."""
    counts = [leaf for leaf in state_leaves if leaf.is_count]
    for leaf in counts:
        if leaf.parameter == parameter != ():
            return leaf.value
    nodes = _nodes(state_leaves, parameter)
    shared = [
        leaf
        for leaf in counts
        if not leaf.parameter and (leaf.node in nodes or leaf.field == "count")
    ]
    # The count in the moments' state, or a schedule's in the same chain: each label of
    # `optax.partition` has one.
    near = lambda leaf: (leaf.node in nodes, _nearness(leaf.node, nodes))
    return max(shared, key=near).value if shared else None


def counted_by(state_leaves: Iterable[StateLeaf], count: StateLeaf) -> set[KeyPath]:
    """Returns the parameters whose steps a count counts."""
    if count.parameter:
        return {count.parameter}
    near = {
        parameter: _nearness(count.node, _nodes(state_leaves, parameter))
        for parameter in {leaf.parameter for leaf in state_leaves if leaf.is_moment}
    }
    return {x for x, common in near.items() if common == max(near.values())}


def _nodes(state_leaves: Iterable[StateLeaf], parameter: KeyPath) -> set[KeyPath]:
    return {x.node for x in state_leaves if x.is_moment and x.parameter == parameter}


def _nearness(node: KeyPath, nodes: Iterable[KeyPath]) -> int:
    """Returns the length of the longest prefix that a path shares with any other."""
    equal = lambda keys: keys[0] == keys[1]
    common = (takewhile(equal, zip(node, x, strict=False)) for x in nodes)
    return max(len([*keys]) for keys in common)
