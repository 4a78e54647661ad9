"""Layers that are equal subtrees of the parameters, numbered by name."""

import collections
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from jax.core import ShapedArray

from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import key_names
from paged_optax.backend.types import KeyPath

#: Names of a path's keys. A key such as "decoder/h_0" or "layers.0" has two.
Names = tuple[str, ...]

#: A parameter's number, or its stack.
Item = TypeVar("Item")

#: Identifies a parameter within its layer: whether it is frozen, and its names.
Member = tuple[bool, Names]


@dataclasses.dataclass(frozen=True)
class NumberedLayers:
    """Layers that are subtrees of the parameters."""

    name: str  # common prefix of all paths; "*" if there is none
    members: tuple[Mapping[Member, int], ...]  # numbers of each layer's leaves
    nbytes: int
    guess: bool = False  # parameters are in several lists, perhaps of different layers

    @property
    def length(self) -> int:
        """Number of layers."""
        return len(self.members)

    @property
    def shown(self) -> str:
        """The prefix of the layers' paths, for tables and messages."""
        several = self.guess and self.name == "*"
        return "all lists" if several else f"{self.name.removesuffix('*')}*"

    @property
    def leaves(self) -> set[int]:
        """The numbers of the layers' parameters."""
        return {n for each in self.members for n in each.values()}

    def parts(self, nbytes: Callable[[int], int]) -> tuple["NumberedLayers", ...]:
        """Separates trained and frozen parameters; empty if layers lack one of them.

        `nbytes` returns the bytes of a parameter by its number.
        """
        parts: list[NumberedLayers] = []
        for frozen in (False, True):
            chosen = lambda each, frozen=frozen: {
                member: n for member, n in each.items() if member[0] == frozen
            }
            members = tuple(map(chosen, self.members))
            size = sum(nbytes(n) for each in members for n in each.values())
            parts.append(dataclasses.replace(self, members=members, nbytes=size))
        return tuple(parts) if all(part.nbytes for part in parts) else ()


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
    whole = [key_names(path) for path in paths]
    parted = [tuple(part for x in names for part in _parts(x)) for names in whole]
    times = collections.Counter(parted)
    # Names that are a prefix of another path, and paths with such a prefix.
    inner = {names[:k] for names in times for k in range(len(names))}
    outer = lambda names: any(names[:k] in times for k in range(len(names)))
    distinct = lambda names: (
        times[names] == 1 and names not in inner and not outer(names)
    )
    pairs = zip(whole, parted, strict=True)
    return [names if distinct(names) else unparted for unparted, names in pairs]


def _parts(name: str) -> list[str]:
    return re.split(r"[/.]", name)


def numbered(
    leaves: Sequence[tuple[bool, Names]], avals: Sequence[ShapedArray]
) -> list[NumberedLayers]:
    """Returns all lists of equal subtrees, the largest first.

    `leaves` holds whether each leaf is frozen, and its names.
    """
    groups: dict[tuple[Names, str], dict[int, dict[Member, int]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    whole_names: dict[tuple[Names, str], dict[Member, int]] = defaultdict(dict)
    for number, (frozen, names) in enumerate(leaves):
        # The last name belongs to an array. `_by_kind` returns lists of arrays.
        for k, name in enumerate(names[:-1] if len(names) > 1 else ()):
            member = frozen, names[k + 1 :]
            whole_names[names[:k], name][member] = number
            if match := _numbered(name):
                stem, n = match
                groups[names[:k], stem][n][member] = number
    lists: list[NumberedLayers] = []
    for (before, stem), by_number in groups.items():
        # The first of Haiku's names has no number.
        if 0 not in by_number and 1 in by_number and stem:
            if first := whole_names.get((before, stem)):
                by_number = {0: first, **by_number}
        members = [by_number[n] for n in sorted(by_number)]
        if layers := _longest_run(members, avals):
            layers = [relabeled(each, lambda n: avals[n].ndim) for each in layers]
            size = nbytes([avals[n] for each in layers for n in each.values()])
            name = "/".join((*before, stem)) or "*"
            lists.append(NumberedLayers(name, tuple(layers), size))
    lists += _by_kind(leaves, avals, [x.leaves for x in lists])
    return sorted(lists, key=lambda x: -x.nbytes)


def _by_kind(
    leaves: Sequence[tuple[bool, Names]],
    avals: Sequence[ShapedArray],
    known: Sequence[set[int]],
) -> list[NumberedLayers]:
    """Layers whose parameters are in several lists, such as `params["mlp"][n]`.

    They include lists of arrays, such as `params["up"][n]`. If several candidates have
    the same parameters, the longest common path wins. `known` holds the parameters of
    other lists.
    """
    groups: dict[Names, dict[Names, dict[int, dict[Member, int]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for number, (frozen, names) in enumerate(leaves):
        for k, name in enumerate(names):
            if not (match := _numbered(name)):
                continue
            for start in range(k, -1, -1):
                # An earlier number belongs to a list around this list.
                if start < k and _numbered(names[start]):
                    break
                kind = (*names[start:k], *filter(None, match[:1]))
                layer = groups[names[:start]][kind][match[1]]
                layer[frozen, names[k + 1 :]] = number
    lists: dict[frozenset[int], NumberedLayers] = {}
    for before in sorted(groups, key=len):
        by_length: dict[int, list[dict[Member, int]]] = {}
        kinds = collections.Counter[int]()
        for kind, by_number in groups[before].items():
            members = _longest_run([by_number[n] for n in sorted(by_number)], avals)
            each = by_length.setdefault(len(members), [{} for _ in members])
            kinds[len(members)] += 1
            for layer, part in zip(each, members, strict=True):
                layer |= {(f, (*kind, *names)): n for (f, names), n in part.items()}
        for members in by_length.values():
            chosen = frozenset(n for each in members for n in each.values())
            # A list of arrays within another list is named by itself.
            named = all(names for each in members[:1] for _, names in each)
            if members and set(chosen) not in known and (named or chosen not in lists):
                members = [relabeled(x, lambda n: avals[n].ndim) for x in members]
                size = nbytes([avals[n] for n in chosen])
                name = "/".join((*before, "")) or "*"
                several = kinds[len(members)] > 1
                # Prefixes are sorted by length, so that the longest one wins.
                lists[chosen] = NumberedLayers(name, tuple(members), size, several)
    return list(lists.values())


def _numbered(name: str) -> tuple[str, int] | None:
    """Separates a name from its number; None without a number."""
    match = re.fullmatch(r"(.*?)_?(\d+)", name)
    return match and (match[1], int(match[2]))


def relabeled(
    members: Mapping[Member, Item], ndim: Callable[[Item], int]
) -> dict[Member, Item]:
    """Renames numbered parts of a layer that could be mistaken for layers.

    Matrices distinguish a tree of stacks from a list of layers. If all parts are
    vectors, or if a layer is one array, the parts' names get a prefix without a number.
    `ndim` returns the number of axes of a part within one layer.
    """
    renamed: dict[Member, Item] = {}
    for frozen in (False, True):
        weights = {
            names: x for (is_frozen, names), x in members.items() if is_frozen == frozen
        }
        mistaken = all(
            not names or (_numbered(names[0]) and ndim(x) < 2)
            for names, x in weights.items()
        )
        for names, x in weights.items():
            renamed[frozen, ("layer", *names) if mistaken else names] = x
    return renamed


def first_names(members: Iterable[Member]) -> str:
    """The first names of parameters that have none in common."""
    first = sorted({names[0] if names else "" for _, names in members})
    return ", ".join([*first[:3], *(["..."] if len(first) > 3 else [])])


def matching_lists(layers: str, names: Sequence[str]) -> list[str]:
    """Returns the lists that `"layers"` or `"model/h_*"` names.

    A prefix of the path suffices. An exact name excludes all other lists, for example
    a list within one of the layers.
    """
    plain = lambda name: "/".join(_parts(name.removesuffix("*"))).rstrip("/_")
    prefix = plain(layers)
    exact = [name for name in names if plain(name) == prefix]
    return exact or [name for name in names if name.startswith(f"{prefix}/")]


def _longest_run(
    members: Sequence[Mapping[Member, int]], avals: Sequence[ShapedArray]
) -> list[dict[Member, int]]:
    """The longest run of equal subtrees, or of equal groups of subtrees.

    The first or the last subtrees may differ, for example dense layers before experts.
    """
    described = [
        frozenset((member, avals[n].shape, avals[n].dtype) for member, n in x.items())
        for x in members
    ]
    # The longest run wins, then the shortest period. Layers of alternating kinds have
    # groups of several subtrees.
    best: tuple[int, int, range] = (0, 0, range(0))
    for period in range(1, len(members) // 2 + 1):
        start = 0
        for i in range(period, len(members) + 1):
            if i < len(members) and described[i] == described[i - period]:
                continue
            count = (i - start) // period
            if count > 1 and (count * period, -period) > best[:2]:
                best = count * period, -period, range(start, start + count * period)
            start = i - period + 1
    _, period, chosen = best
    if not period:
        return []
    blocks = [chosen[k : k - period] for k in range(0, len(chosen), -period)]
    if period == -1:
        return [dict(members[n]) for n in chosen]
    return [
        {
            (frozen, (str(offset), *names)): number
            for offset, n in enumerate(block)
            for (frozen, names), number in members[n].items()
        }
        for block in blocks
    ]
