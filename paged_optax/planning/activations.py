"""A model's layers by the shapes of its parameters, and the activations of a batch.

Layers are stacked, or numbered by name. The constants count buffers that XLA:GPU holds
at the same time, read off its buffer assignment for an H200 of decoders whose layers
are each a `jax.checkpoint` (jax 0.12.0.1). `tests/planning/test_activations.py` bounds
the difference to XLA's bytes.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence

import jax
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import path_name
from paged_optax.losses import Chunks

NamedShape = tuple[str, jax.ShapeDtypeStruct]

# More entries of a leading axis are a width, not layers.
_MOST_LAYERS = 1000
_FLOAT32 = 4  # bytes
# The matrix of queries, as decoders name it: `q`, `q_proj`, `wq`, `query/kernel`.
_QUERY = re.compile(r"(^|[/._])(q|wq|q_einsum|query)([/._]|$)")
_HEAD = 128  # values of a head of Llama 3 and Qwen 3, where shapes do not show it


@dataclasses.dataclass(frozen=True)
class Layers:
    """Equal layers of a model: the arrays of one layer, and all others."""

    count: int
    one: tuple[NamedShape, ...]
    remaining: tuple[NamedShape, ...]
    numbered: str = ""  # the first layer, such as "model.layers.0"; empty for stacks

    @property
    def largest(self) -> int:
        """Bytes of one layer's parameters."""
        return nbytes([x for _, x in self.one])

    @property
    def outside(self) -> tuple[int, ...]:
        """Bytes of each parameter outside the layers."""
        return tuple(nbytes(x) for _, x in self.remaining)


def find_layers(params: PyTree, key: str) -> Layers | None:
    """Finds the layers: stacks under a key, or the most bytes of numbered layers."""
    leaves = _by_path(params)
    remaining = lambda layers: tuple(x for n, x in enumerate(leaves) if n not in layers)
    stacks, length = _stacks(leaves, key)
    if stacks:
        cut = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        one = tuple((path, cut(x)) for path, x in (leaves[n] for n in stacks))
        return Layers(length, one, remaining({*stacks}))
    # Any number in a path may be a layer's. The text before it names the list, the text
    # after it the array within the layer.
    numbered = collections.defaultdict[tuple[str, int], dict[str, int]](dict)
    for n, (path, _) in enumerate(leaves):
        for match in re.finditer(r"\d+(?=[^\d])", path):
            layer = path[: match.start()], int(match[0])
            numbered[layer][path[match.end() :]] = n
    alike = collections.defaultdict[object, list[tuple[str, int]]](list)
    for layer, arrays in numbered.items():
        types = frozenset((name, leaves[n][1]) for name, n in arrays.items())
        alike[layer[0], types].append(layer)
    numbers = lambda family: {n for layer in family for n in numbered[layer].values()}
    size = lambda family: nbytes([leaves[n][1] for n in numbers(family)])
    best = max((x for x in alike.values() if len(x) > 1), key=size, default=None)
    if best is None:
        return None
    prefix, index = min(best)
    one = tuple(leaves[n] for n in numbered[prefix, index].values())
    return Layers(len(best), one, remaining(numbers(best)), f"{prefix}{index}")


def stacks_under(params: PyTree, key: str) -> frozenset[int]:
    """Leaf positions of the stacks under a key; empty without stacks."""
    stacks, length = _stacks(_by_path(params), key)
    return frozenset(stacks if length <= _MOST_LAYERS else ())


def _by_path(params: PyTree) -> list[NamedShape]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [
        (path_name(path), jax.ShapeDtypeStruct(x.shape, x.dtype)) for path, x in leaves
    ]


def _stacks(leaves: Sequence[NamedShape], key: str) -> tuple[list[int], int]:
    """Positions of the stacks under a key, and their length."""
    inner = [n for n, (path, _) in enumerate(leaves) if key in path.split("/")]
    lengths = {leaves[n][1].shape[:1] for n in inner}
    if len(lengths) != 1 or lengths == {()}:
        return [], 0
    # Matrices and vectors of a list of layers may begin with one width.
    pattern = re.compile(rf"(^|/){re.escape(key)}/[^/\d]*\d+(/|$)")
    listed = any(pattern.search(leaves[n][0]) for n in inner)
    if listed and max(len(leaves[n][1].shape) for n in inner) < 3:
        return [], 0
    return inner, lengths.pop()[0]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The batch of a step, and the form of its loss, as in `what_fits`."""

    batch: int  # sequences
    length: int  # tokens of a sequence
    score_blocks: int = 1
    fused_head: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model that its activations depend on; 0 if unknown."""

    layers: int  # number of layers
    width: int  # values of a token between two layers
    projected: int  # sum of a token's values on the other sides of a layer's matrices
    widest: int  # the largest of these sides
    query: int  # values of a token's queries
    heads: int
    vocabulary: int  # entries of the output
    tied: bool  # the output matrix is the embedding
    itemsize: int  # bytes of a value in the products' dtype

    def operations(self, parameters: int, workload: Workload) -> int:
        """Operations of a step's products."""
        # Each layer's forward pass runs twice: eight operations a parameter and token,
        # and four times four a pair of tokens and value of a query.
        attention = 16 * self.layers * workload.length * self.query
        return workload.tokens * (8 * parameters + attention)


def get_sizes(layers: Layers, heads: int | None) -> tuple[Sizes, str]:
    """The sizes of a model, and a note on assumed heads.

    All experts of a mixture are counted, as if each token went to each expert.
    """
    matrices = [(path, x.shape) for path, x in layers.one if len(x.shape) > 1]
    counts = collections.Counter(n for _, shape in matrices for n in {*shape})
    width = max(counts, key=lambda n: (counts[n], n), default=1)
    projected = [max(1, math.prod(shape) // width) for _, shape in matrices]
    queries = [shape for path, shape in matrices if _QUERY.search(path)]
    shape = queries[0] if queries else (0,)
    query = math.prod(shape) // width
    # [width, heads, head] in Flax; [heads, width, head] in Gemma.
    axes = [n for n in shape if n != width] if len(shape) == 3 else []
    assumed = axes[0] if axes else query // _HEAD
    outputs = [x.size // width for _, x in layers.remaining if width in x.shape]
    vocabulary = max((n for n in outputs if n > 1), default=0)
    sizes = Sizes(
        layers.count,
        width,
        sum(projected),
        max(projected, default=0),
        query,
        # Products of NumPy's integers overflow.
        assumed if heads is None else int(heads),
        vocabulary,
        outputs.count(vocabulary) < 2,
        max((x for _, x in layers.one), key=lambda x: x.size).dtype.itemsize,
    )
    note = (
        "No matrix of queries is known by its name, so that no attention scores are"
        " counted: heads= states how many heads there are."
    )
    if assumed:
        note = f"{assumed} heads of {_HEAD} values are assumed: heads= states another"
        note += " number."
    return sizes, "" if heads is not None or len(shape) == 3 else note


@dataclasses.dataclass(frozen=True)
class ActivationBytes:
    """Bytes that are live at the same time in the parts of a step."""

    saved: int  # the layers' inputs, from the forward to the backward pass
    layer: int  # one layer's backward pass, without attention scores
    forward: int  # the part of it from the forward pass
    scores: int  # attention scores of one layer
    head: int  # the loss of the last layer's output
    waiting: int  # the output matrix's gradient, until the layers' backward pass ends

    @staticmethod
    def of(sizes: Sizes, workload: Workload) -> "ActivationBytes":
        """The sums of a workload."""
        n, b, width = workload.tokens, sizes.itemsize, sizes.width
        # Inputs and outputs of all products, for the gradients of weights; the gradient
        # of the widest; and eight arrays of the stream's width: the input, two norms,
        # the sum in the middle, and gradients.
        forward = n * b * sizes.projected
        layer = forward + n * b * (sizes.widest + 8 * width)
        # The softmax's gradient in float32, and scores, shares and the gradient of the
        # scores in the products' dtype.
        scores = workload.batch * sizes.heads * workload.length**2 * (_FLOAT32 + 3 * b)
        stream = 4 * n * width * b  # the output, its norm, and their gradients
        waiting = width * sizes.vocabulary * b
        if workload.fused_head:
            # A chunk of logits in float32, its gradient, and the gradient of x.
            chunks = Chunks.of(sizes.vocabulary, 0, n, width, None)
            chunk = n * chunks.blocks * chunks.size
            head = chunk * (_FLOAT32 + b) + _FLOAT32 * n * width + stream
        else:
            # Logits in float32, which their gradient overwrites, and its cast.
            head = n * sizes.vocabulary * (_FLOAT32 + b) + stream
            if sizes.tied:
                # XLA keeps the gradient of the logits until the embedding's gradient.
                waiting = n * sizes.vocabulary * b
        saved = sizes.layers * n * width * b
        scores //= workload.score_blocks
        return ActivationBytes(saved, layer, forward, scores, head, waiting)
