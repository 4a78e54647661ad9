"""The leaves of parameters and state, and the order of their updates."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import as_pure, unflatten_like
from paged_optax.backend.memory import DEVICE, HOST, nbytes, on_host
from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath
from paged_optax.codecs import Quantized
from paged_optax.engine.paged_array import Stored
from paged_optax.engine.shards import Shards
from paged_optax.layerwise.layer_tree import is_stored, stack_of, with_stack
from paged_optax.layerwise.parameters import Partition, stack_length
from paged_optax.layerwise.slices import LayerIndex, is_sliced, write_slice
from paged_optax.transform.trees import leaf_paths, parameter_of

Value = TypeVar("Value")


# More groups hold fewer bytes on the device. With four, a group is about one large
# matrix of a transformer's layer.
_GROUPS = 4


class Group(NamedTuple):
    """Leaves of a layer with a common update."""

    positions: tuple[int, ...]  # among the layer's leaves
    moment_positions: tuple[int, ...]  # of their moments, among the state's stacks


def group_leaves(
    travel: Mapping[int, int],
    param_indices: Sequence[int] = (),
    maximum: int = _GROUPS,
) -> list[Group]:
    """Divides a layer's leaves into groups of about equal travel.

    Args:
      travel: The bytes of each leaf that travel, by its position.
      param_indices: For each of the state's stacks, the position of its leaf.
      maximum: The largest number of groups.
    """
    count = min(maximum, sum(map(bool, travel.values())))
    groups: list[list[int]] = [[] for _ in range(max(1, count))]
    sizes = [0] * len(groups)
    for size, index in sorted(((x, n) for n, x in travel.items()), reverse=True):
        minimum = sizes.index(min(sizes))
        groups[minimum].append(index)
        sizes[minimum] += size
    moments = lambda group: (n for n, k in enumerate(param_indices) if k in group)
    # The smallest comes first. It is fetched during the last segment, where XLA:GPU
    # starts transfers late (jax 0.12.0.1).
    return [
        Group(tuple(sorted(group)), tuple(moments(group)))
        for _, group in sorted(zip(sizes, groups, strict=True))
    ]


class LayeredState:
    """The leaves of parameters and state.

    Attributes:
      partition: The parameters, partitioned.
      length: The number of layers.
      chunked: The numbers of the parameters outside the layers that are updated in
        chunks, one chunk with each layer.
      params: All parameters.
      gradients: The shapes of their gradients.
      sliced: For each parameter, true if it is updated in slices or chunks.
      numbers: The numbers of the layers' parameters, then of the chunked ones. A leaf's
        position is its index in this list.
      shards: The division of each parameter, or None if it is not known.
      moment_shards: The division of each parameter's moments.
      state_structure: The structure of the state.
      state_paths: The paths of the state.
      state: Its leaves.
      param_indices: For each leaf of the state, the number of its parameter, or None.
      shared: The leaves that all layers share, such as counts, by number.
      moment_numbers: The numbers of the state's leaves that are updated in slices or in
        chunks.
      moments: These leaves.
      moment_params: For each of `moments`, the number of its parameter.
      sliced_shards: The division of each of `moments`.
    """

    def __init__(
        self,
        params: PyTree[Array],
        partition: Partition,
        state: PyTree[Array],
        gradients: PyTree[Array],
        shards: tuple[Sequence[Shards | None], Sequence[Shards | None]],
        chunked: Sequence[int] = (),
    ):
        self._args = params, partition, state, gradients, shards
        self.partition, self.chunked = partition, tuple(chunked)
        self.shards, self.moment_shards = shards
        self.length = stack_length(partition.layers)
        paths, self.params = leaf_paths(as_pure(params))
        trees = jax.tree.leaves(gradients), partition.others(partition.rest)
        self.gradients = [
            jax.ShapeDtypeStruct(x.shape, g.dtype)
            for x, g in zip(self.params, partition.combine(*trees), strict=True)
        ]
        inner = enumerate(zip(partition.in_layers, self.params, strict=True))
        self.sliced = [
            n in chunked or (flag and is_sliced(x)) for n, (flag, x) in inner
        ]
        self.numbers = [n for n, inner in enumerate(partition.in_layers) if inner]
        self.numbers += self.chunked
        self.state_structure = jax.tree.structure(state, is_leaf=is_stored)
        self.state_paths, self._stored = leaf_paths(as_pure(state), is_stored)
        self.state: list[Stored] = list(map(stack_of, self._stored))
        self.param_indices = parameter_of(self.state_paths, paths)
        owned = {
            k: n
            for k, n in enumerate(self.param_indices)
            if n is not None and jax.tree.leaves(self.state[k])[0].ndim
        }
        self.shared = {k: x for k, x in enumerate(self.state) if k not in owned}
        self.moment_numbers = [k for k, n in owned.items() if self.sliced[n]]
        self.moment_params = [owned[k] for k in self.moment_numbers]
        # Scales stay on the device: on a TPU a slice of a vector is no whole tile.
        self.moments = [
            _scales_to(self.state[k], host=False) for k in self.moment_numbers
        ]
        pairs = zip(self.moments, self.moment_params, strict=True)
        self.sliced_shards = [self._shards_of(*pair) for pair in pairs]

    def in_chunks(self, numbers: Sequence[int]) -> "LayeredState":
        """The same leaves, with these parameters updated in chunks."""
        return LayeredState(*self._args, numbers)

    def _shards_of(self, x: Stored, param_index: int) -> Shards | None:
        shards, shape = self.moment_shards[param_index], jax.tree.leaves(x)[0].shape
        if shards is None or len(shape) != len(shards.axes):
            return None  # such as factors
        axes = zip(shape, shards.divisions, strict=True)
        return shards if all(n % parts == 0 for n, parts in axes) else None

    def grouped(self, maximum: int = _GROUPS) -> list[Group]:
        """Groups the leaves that are updated in slices, with about equal transfers."""
        positions = {number: position for position, number in enumerate(self.numbers)}
        moving = [(n, self.params[n]) for n in self.numbers if self.sliced[n]]
        travel = {positions[n]: 0 for n, _ in moving}
        for n, x in [*moving, *zip(self.moment_params, self.moments, strict=True)]:
            travel[positions[n]] += nbytes(x) if on_host(x) else 0
        return group_leaves(travel, [positions[n] for n in self.moment_params], maximum)

    def of_layers(self, values: Sequence[Value]) -> list[Value]:
        """Selects the layers' values from one value for each parameter."""
        inner = self.partition.in_layers
        return [x for x, flag in zip(values, inner, strict=True) if flag]

    def small_gradients(self) -> list[Array | None]:
        """Zeros for the gradients of all layers' small leaves, such as norms."""
        zeros = lambda x, sliced: None if sliced else jnp.zeros(x.shape, x.dtype)
        return self.of_layers([*map(zeros, self.gradients, self.sliced)])

    def others_with(
        self, params: Sequence[Array], chunked: Sequence[Array]
    ) -> list[Array]:
        """The parameters outside the layers, with new chunked ones."""
        new = dict(zip(self.chunked, chunked, strict=True))
        inner = enumerate(self.partition.in_layers)
        return [new.get(n, params[n]) for n, flag in inner if not flag]

    def check_same_stacks(self) -> None:
        """Raises if moments of layers cannot be sliced like their parameters."""
        for k, n in zip(self.moment_numbers, self.moment_params, strict=True):
            _check_same_stack(self.state_paths[k], self.state[k], self.params[n])

    def new_state(
        self, moments: Sequence[Stored], leaves: Sequence[Stored | None]
    ) -> PyTree:
        """Builds the new state."""
        new = list(leaves)
        for k, x in zip(self.moment_numbers, moments, strict=True):
            old = self.state[k]
            new[k] = unflatten_like(old, _scales_to(x, host=on_host(old)))
        return unflatten_like(self._args[2], [*map(with_stack, self._stored, new)])


def store_small(
    small: Sequence[Array | None], gradients: Sequence[Array], i: LayerIndex
) -> list[Array | None]:
    """Stores the gradients of layer i's small leaves."""
    return [
        None if stack is None else write_slice(stack, g, i)
        for stack, g in zip(small, gradients, strict=True)
    ]


def _scales_to(x: Stored, *, host: bool) -> Stored:
    """Moves a stack's scales to the device, or back to the host."""
    if not isinstance(x, Quantized):
        return x
    scales = x.scales
    if on_host(x):
        scales = jax.device_put(scales, HOST if host else DEVICE)
    # The container names no codec, like the containers of single layers.
    return Quantized(x.codes, scales)


def _check_same_stack(path: KeyPath, x: Stored, param: Array) -> None:
    length = param.shape[0]
    hint = (
        "use moments of the parameters' own shape; with a codec, layers of whole"
        " blocks, or the codec 'float32' for this parameter."
    )
    if not isinstance(x, Quantized):
        fits = x.shape == param.shape
    else:
        values, scales = param.size // length, x.scales.size // length
        stacked = x.scales.ndim == 1 or x.scales.shape[0] == length
        whole = x.codes.shape[0] == length and x.scales.size % length == 0
        fits = stacked and whole and values % -(-values // scales) == 0
        if x.scales.ndim == 2:
            # Scales have two axes only if parts are no ranges of whole blocks.
            hint = (
                f"it is divided into {x.scales.shape[0]} parts, and a block runs"
                " through several rows of a part: divide another axis of the"
                " parameter, or none."
            )
    if not fits:
        shapes = jax.tree.map(lambda x: x.shape, x)
        raise ValueError(
            f"state{keystr(path)} has shape {shapes}, which cannot be cut into the"
            f" {length} layers of its parameter of shape {param.shape}: {hint}"
        )
