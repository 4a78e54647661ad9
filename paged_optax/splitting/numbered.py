"""Candidates for the layers of a loss: equal subtrees of parameters, by number."""

import collections
import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
from jax.core import ShapedArray

from paged_optax.analysis.program import Equation
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import key_names
from paged_optax.backend.types import KeyPath

#: Names of a path's keys. A key such as "decoder/h_0" or "layers.0" has two.
Names = tuple[str, ...]

#: A parameter's shape and dtype.
Aval = ShapedArray | jax.ShapeDtypeStruct

#: Identifies a parameter within its layer: whether it is frozen, and its names.
Member = tuple[bool, Names]

#: The leaves of each parameter in equal subtrees.
_Run = Mapping[Member, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Stack:
    """The leaves of a tree that hold one parameter of all layers."""

    # Number of each layer's leaf, or of the only leaf if it is a stack.
    leaves: tuple[int, ...]
    # The layers' axis of that leaf; None if each layer has a leaf.
    axis: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """Layers that a loss may be split into."""

    name: str  # common prefix of the paths; "*" if there is none
    shown: str  # for tables and messages
    stacks: Mapping[Member, Stack]
    length: int  # number of layers
    guess: bool = False  # other layers with these parameters are more likely
    scan: Equation | None = None  # the scan over the stacks

    @property
    def leaves(self) -> set[int]:
        """The numbers of the layers' parameters."""
        return {n for stack in self.stacks.values() for n in stack.leaves}

    @property
    def members(self) -> list[dict[Member, int]]:
        """The numbers of each layer's parameters; of the stacks, if they are one."""
        names, stacks = list(self.stacks), self.stacks.values()
        leaves = zip(*(x.leaves for x in stacks), strict=True)
        return [dict(zip(names, layer, strict=True)) for layer in leaves]

    def nbytes(self, avals: Sequence[Aval]) -> int:
        """Bytes of the layers' parameters."""
        return nbytes([avals[n] for n in self.leaves])

    def parts(self) -> list["Candidate"]:
        """The trained and the frozen parameters alone; empty if there are not both."""
        frozen = {is_frozen for is_frozen, _ in self.stacks}
        if self.scan is not None or len(frozen) == 1:
            return []
        part = lambda frozen: {m: x for m, x in self.stacks.items() if m[0] == frozen}
        return [dataclasses.replace(self, stacks=part(x)) for x in (False, True)]


def relabeled(
    stacks: Mapping[Member, Stack], avals: Sequence[Aval]
) -> dict[Member, Stack]:
    """Renames numbered parts of a layer that could be mistaken for layers.

    Matrices distinguish a tree of stacks from a list of layers. If all parts are
    vectors, or if a layer is one array, the parts' names get a prefix without a number.
    """
    vector = lambda x: avals[x.leaves[0]].ndim - (x.axis is not None) < 2
    mistaken = {
        frozen: all(
            not names or (_numbered(names[0]) and vector(x))
            for (is_frozen, names), x in stacks.items()
            if is_frozen == frozen
        )
        for frozen in (False, True)
    }
    return {
        (frozen, ("layer", *names) if mistaken[frozen] else names): x
        for (frozen, names), x in stacks.items()
    }


def split_names(paths: Sequence[KeyPath]) -> list[Names]:
    """Returns the names of a tree's paths, with keys split at slashes and dots.

    A key stays whole if two paths would be equal, or one a prefix of the other, so that
    nested dicts of these names keep every leaf.

    Example:
      >>> import jax
      >>> key = jax.tree_util.DictKey
      >>> split_names([(key("layers.0.up"),), (key("a/b"),), (key("a"),)])
      [('layers', '0', 'up'), ('a/b',), ('a',)]
    """
    full = [key_names(path) for path in paths]
    parted = [tuple(part for x in names for part in _split_name(x)) for names in full]
    times = collections.Counter(parted)
    # Names that are a prefix of another path, and paths with such a prefix.
    inner = {names[:k] for names in times for k in range(len(names))}
    outer = lambda names: any(names[:k] in times for k in range(len(names)))
    distinct = lambda names: (
        times[names] == 1 and names not in inner and not outer(names)
    )
    pairs = zip(full, parted, strict=True)
    return [names if distinct(names) else unparted for unparted, names in pairs]


def numbered(
    leaves: Sequence[tuple[bool, Names]], avals: Sequence[Aval]
) -> list[Candidate]:
    """Returns all lists of equal subtrees.

    Subtrees of one list are layers, and so are those of several lists of one length,
    such as `params["mlp"][n]`. If several candidates have the same parameters, the
    longest common path wins. `leaves` holds whether each leaf is frozen, and its names.
    """
    runs = _runs(leaves, avals)
    lists: dict[frozenset[int], Candidate] = {}

    def add(name: str, leaves: _Run, several: bool) -> None:
        stacks = relabeled({x: Stack(item) for x, item in leaves.items()}, avals)
        shown = f"{name.removesuffix('*')}*" if name != "*" or not several else ""
        length = len(next(iter(leaves.values())))
        layers = Candidate(name, shown or "all lists", stacks, length, several)
        lists[frozenset(layers.leaves)] = layers

    prefixes = sorted(runs, key=len)
    for prefix in prefixes:
        for (direct, kind), run in runs[prefix].items():
            if direct and all(names for _, names in run):
                add("/".join((*prefix, *(kind or ("",)))) or "*", run, False)
    subtrees = set(lists)
    for prefix in prefixes:
        by_length = defaultdict[int, list[tuple[Names, _Run]]](list)
        for (_, kind), run in runs[prefix].items():
            by_length[len(next(iter(run.values())))].append((kind, run))
        for group in by_length.values():
            stacks = {
                (frozen, (*kind, *names)): item
                for kind, run in group
                for (frozen, names), item in run.items()
            }
            subset = frozenset(n for item in stacks.values() for n in item)
            # A list of arrays within another list is named by itself.
            named = all(names for _, names in stacks)
            if subset not in subtrees and (named or subset not in lists):
                add("/".join((*prefix, "")) or "*", stacks, len(group) > 1)
    return list(lists.values())


def _runs(
    leaves: Sequence[tuple[bool, Names]], avals: Sequence[Aval]
) -> Mapping[Names, Mapping[tuple[bool, Names], _Run]]:
    """The longest run of numbered subtrees by prefix and kind.

    A kind is the names between the prefix and the number, and whether the prefix ends
    at the number.
    """
    numbers = defaultdict[tuple[Names, str], set[int]](set)
    for _, names in leaves:
        for k, name in enumerate(names):
            if match := _numbered(name):
                numbers[names[:k], match[0]].add(match[1])

    def number_of(names: Names, k: int) -> tuple[str, int] | None:
        # The first of Haiku's names has no number.
        known = numbers.get((names[:k], names[k]), set[int]())
        first = names[k] and 1 in known and 0 not in known
        return (names[k], 0) if first else _numbered(names[k])

    subtrees: dict[tuple[Names, str], dict[int, dict[Member, int]]] = {}
    for index, (frozen, names) in enumerate(leaves):
        for k in range(len(names)):
            if match := number_of(names, k):
                members = subtrees.setdefault((names[:k], match[0]), {})
                members.setdefault(match[1], {})[frozen, names[k + 1 :]] = index
    runs = defaultdict[Names, dict[tuple[bool, Names], _Run]](dict)
    for (names, kind), members in subtrees.items():
        run = _longest_run([members[n] for n in sorted(members)], avals)
        for k in range(len(names), -1, -1) if run else ():
            # An earlier number belongs to a list around this list.
            if k < len(names) and number_of(names, k):
                break
            runs[names[:k]][k == len(names), (*names[k:], *filter(None, [kind]))] = run
    return runs


def _longest_run(
    members: Sequence[Mapping[Member, int]], avals: Sequence[Aval]
) -> _Run:
    """The longest run of equal subtrees, or of equal groups of subtrees.

    The first or the last subtrees may differ, for example dense layers before experts.
    """
    types = [
        {member: (avals[n].shape, avals[n].dtype) for member, n in subtree.items()}
        for subtree in members
    ]
    kinds = [types.index(x) for x in types]

    def repeats(start: int, period: int) -> int:
        first = kinds[start : start + period]
        parts = (kinds[k : k + period] for k in range(start, len(kinds), period))
        return sum(1 for _ in itertools.takewhile(first.__eq__, parts))

    # The longest run wins, then the shortest period. Layers of alternating kinds have
    # groups of several subtrees.
    runs = [
        (count * period, -period, -start)
        for period in range(1, len(members) // 2 + 1)
        for start in range(len(members) - period)
        if (count := repeats(start, period)) > 1
    ]
    if not runs:
        return {}
    size, period, start = map(abs, max(runs))
    return {
        (frozen, (*([str(offset)] if period > 1 else []), *names)): tuple(
            members[first + offset][frozen, names]
            for first in range(start, start + size, period)
        )
        for offset in range(period)
        for frozen, names in members[start + offset]
    }


def matching_lists(layers: str, names: Sequence[str]) -> list[str]:
    """Returns the lists that `"layers"` or `"model/h_*"` names.

    A prefix of the path suffices. An exact name excludes all other lists, for example
    a list within one of the layers.
    """
    plain = lambda name: "/".join(_split_name(name.removesuffix("*"))).rstrip("/_")
    prefix = plain(layers)
    exact = [name for name in names if plain(name) == prefix]
    return exact or [name for name in names if name.startswith(f"{prefix}/")]


def _split_name(name: str) -> list[str]:
    return re.split(r"[/.]", name)


def _numbered(name: str) -> tuple[str, int] | None:
    """Separates a name from its number; None without a number."""
    match = re.fullmatch(r"(.*?)_?(\d+)", name)
    return match and (match[1], int(match[2]))
