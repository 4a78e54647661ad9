"""A model's layers by the shapes of its parameters, and the activations of a batch.

Layers are stacked, or numbered by name. Each constant of the activations is a count of
buffers that XLA:GPU has alive at once, read off its buffer assignment for an H200 of
decoders whose layers are each a `jax.checkpoint` (jax 0.12.0.1).
`tests/planning/test_activations.py` holds the sums against it.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Sequence

import jax
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import path_name, readable_bytes
from paged_optax.losses.chunks import Chunks

NamedShape = tuple[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a model, all alike.

    Attributes:
      largest: Bytes of one layer's parameters.
      rest: Bytes of all parameters that are no layer's.
      largest_of_rest: Bytes of the largest of them.
      count: How many there are.
      one: The arrays of one layer, by path.
      others: All arrays that are no layer's, by path.
      numbered: How the first one is named, as in `"model.layers.0"`; empty if they are
        stacked.
    """

    largest: int
    rest: int
    largest_of_rest: int
    count: int
    one: tuple[NamedShape, ...]
    others: tuple[NamedShape, ...]
    numbered: str = ""


# Arrays of a longer leading axis have a width there, such as `dense` and `norm`.
_MOST_LAYERS = 1000


def find_layers(params: PyTree, key: str) -> Layers | None:
    """Finds the layers: the stacks under a key, or layers that are numbered by name.

    If there is no stack, it is the largest family of alike layers that differ by a
    number in their names; None if there is none.
    """
    leaves = _by_path(params)
    inside = _under(leaves, key)
    size = lambda chosen: nbytes([leaves[n][1] for n in chosen])

    def layers(
        count: int, one: Sequence[NamedShape], inside: Collection[int], first: str = ""
    ) -> Layers:
        others = tuple(x for n, x in enumerate(leaves) if n not in inside)
        rest = [nbytes(x) for _, x in others]
        largest = nbytes([x for _, x in one])
        return Layers(
            largest, sum(rest), max(rest, default=0), count, tuple(one), others, first
        )

    stacks = [leaves[n] for n in inside]
    if length := _stacked(stacks, key):
        cut = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return layers(length, [(path, cut(x)) for path, x in stacks], {*inside})
    # Any number in a path may be a layer's. What stands before it names the list, what
    # follows the array within the layer.
    numbered: dict[tuple[str, int], dict[str, int]] = {}
    for n, (path, _) in enumerate(leaves):
        for match in re.finditer(r"\d+(?=[^\d])", path):  # with something inside it
            layer = numbered.setdefault((path[: match.start()], int(match[0])), {})
            layer[path[match.end() :]] = n
    # Layers of one list are alike if they have the same arrays.
    families: dict[object, list[tuple[str, int]]] = collections.defaultdict(list)
    kind = lambda x: (x.shape, x.dtype)
    for (prefix, number), layer in numbered.items():
        alike = frozenset((name, kind(leaves[n][1])) for name, n in layer.items())
        families[prefix, alike].append((prefix, number))
    of = lambda family: {n for layer in family for n in numbered[layer].values()}
    several = (family for family in families.values() if len(family) > 1)
    most = max(several, key=lambda family: size(of(family)), default=None)
    if most is None:
        return None
    (prefix, number), one = min(most), numbered[min(most)].values()
    first = [leaves[n] for n in one]
    return layers(len(most), first, of(most), f"{prefix}{number}")


def stacks_under(params: PyTree, key: str) -> frozenset[int]:
    """The positions, among all leaves, of the stacks under a key; of none if empty."""
    leaves = _by_path(params)
    inside = _under(leaves, key)
    length = _stacked([leaves[n] for n in inside], key)
    return frozenset(inside if length and length <= _MOST_LAYERS else ())


def _by_path(params: PyTree) -> list[NamedShape]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [
        (path_name(path), jax.ShapeDtypeStruct(x.shape, x.dtype)) for path, x in leaves
    ]


def _under(leaves: Sequence[NamedShape], key: str) -> list[int]:
    return [n for n, (path, _) in enumerate(leaves) if key in path.split("/")]


def _stacked(inside: Sequence[NamedShape], key: str) -> int | None:
    """The length of the stacks under a key; None if they are none.

    Arrays of a list of layers, which may begin with one width, have fewer than three
    axes.
    """
    lengths = {x.shape[:1] for _, x in inside}
    if len(lengths) != 1 or lengths == {()}:
        return None
    number = re.compile(rf"(^|/){re.escape(key)}/[^/\d]*\d+(/|$)")
    listed = any(number.search(path) for path, _ in inside)
    if listed and max(len(x.shape) for _, x in inside) < 3:
        return None
    ((length,),) = lengths
    return length


_FLOAT32 = 4
# The matrix of queries, as decoders name it: `q`, `q_proj`, `wq`, `query/kernel`.
_QUERY = re.compile(r"(^|[/._])(q|wq|q_einsum|query)([/._]|$)")
# Values of a head where the shapes do not say: of Llama 3 and Qwen 3.
_HEAD = 128


@dataclasses.dataclass(frozen=True)
class Workload:
    """The batch of a step, and how its loss is written.

    Attributes:
      batch: Sequences of a step.
      length: Tokens of a sequence.
      heads: Heads of queries, or None: by the shape of the matrix of queries. If that
        has two axes, a head has 128 values.
      score_blocks: Blocks of queries whose scores are computed one after the other.
      fused_head: Whether the loss takes `linear_cross_entropy`.
    """

    batch: int
    length: int
    heads: int | None = None
    score_blocks: int = 1
    fused_head: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model that its activations depend on.

    Attributes:
      layers: How many layers there are.
      width: Values of a token between two layers.
      projected: Values of a token on the other sides of one layer's matrices, in all.
      widest: Values of a token on the largest of these sides.
      query: Values of a token's queries; 0 if no matrix of queries is known.
      heads: Heads of queries; 0 if there is no attention, or none is known.
      vocabulary: Entries of the output; 0 if there is no matrix for it.
      tied: Whether that matrix is the embedding.
      itemsize: Bytes of a value of the matrices, which products are computed in.
      experts: Experts of a layer; 0 if it has none.
    """

    layers: int
    width: int
    projected: int
    widest: int
    query: int
    heads: int
    vocabulary: int
    tied: bool
    itemsize: int
    experts: int = 0

    def of_experts(self, workload: Workload) -> str:
        """What is not counted of experts; empty if there are none."""
        if not self.experts:
            return ""
        # Rows of the tokens, once for each expert: of what goes in, and comes out.
        rows = 4 * self.experts * workload.tokens * self.width * self.itemsize
        return (
            f"{self.experts} experts: activations are those of a layer in which all of"
            " them compute each token. jax.lax.ragged_dot takes more on a GPU, where"
            " JAX makes it a product of every row with every expert: up to"
            f" {readable_bytes(rows)} for each expert that a token is sent to."
        )


@dataclasses.dataclass(frozen=True)
class ActivationBytes:
    """Bytes that are alive at once in the parts of a step.

    Attributes:
      saved: The layers' inputs, from the forward to the backward pass.
      layer: What one layer's backward pass has, without its attention scores.
      forward: The part of it that comes from the forward pass.
      scores: Its attention scores.
      head: What the loss has, of the last layer's output.
      waiting: What the loss leaves on the device until the layers' backward pass is
        over: the output matrix's gradient, or what that is made of.
    """

    saved: int
    layer: int
    forward: int
    scores: int
    head: int
    waiting: int

    @staticmethod
    def of(sizes: Sizes, workload: Workload) -> "ActivationBytes":
        r"""The sums, of tokens :math:`n`, bytes of a value :math:`b` and width `d`.

        .. math::
            \begin{aligned}
            \text{saved} &= L n d b \\
            \text{layer} &= n b \Bigl(\sum_i m_i + \max_i m_i + 8 d\Bigr), \qquad
            \text{forward} = n b \sum_i m_i \\
            \text{scores} &= B h t^2 (4 + 3 b) / k \\
            \text{head} &= n V (4 + b) + 4 n d b \\
            \text{waiting} &= d V b, \text{ or } n V b \text{ if tied}
            \end{aligned}

        with :math:`L` layers, :math:`m_i` values of a token on the other side of a
        layer's i-th matrix, :math:`B` sequences of :math:`t` tokens, :math:`h` heads,
        :math:`k` blocks of queries and :math:`V` entries of the vocabulary. With a
        fused head one chunk of the vocabulary is in the place of :math:`V` in "head",
        which has :math:`4 n d` more, and nothing depends on tied embeddings.
        """
        n, b, width = workload.tokens, sizes.itemsize, sizes.width
        # What goes into each product or comes out of it, for the gradients of weights;
        # the widest once more, as the gradient on its way through the nonlinearity; and
        # of the stream's width the input, two norms, the sum in the middle, and
        # gradients of the stream and of what attention gives and takes.
        forward = n * b * sizes.projected
        layer = forward + n * b * (sizes.widest + 8 * width)
        # The gradient of the softmax is computed in float32. Beside it are, in the
        # products' dtype, the scores, the shares and the gradient of the scores, which
        # two products take.
        scores = workload.batch * sizes.heads * workload.length**2 * (_FLOAT32 + 3 * b)
        stream = 4 * n * width * b  # the output, normalised, and their gradients
        if workload.fused_head:
            # A chunk of logits in float32 and its gradient for the products, and the
            # gradient of x, a sum in float32.
            chunks = Chunks.of(sizes.vocabulary, 0, n, width, None)
            chunk = n * chunks.blocks * chunks.size
            head = chunk * (_FLOAT32 + b) + _FLOAT32 * n * width + stream
        else:
            # Logits in float32, which their gradient overwrites, and this in the
            # products' dtype.
            head = n * sizes.vocabulary * (_FLOAT32 + b) + stream
        waiting = width * sizes.vocabulary * b
        if sizes.tied and not workload.fused_head:
            # It is one with the embedding's gradient, which is made last: until then
            # XLA keeps the gradient of the logits.
            waiting = n * sizes.vocabulary * b
        saved = sizes.layers * n * width * b
        scores //= workload.score_blocks
        return ActivationBytes(saved, layer, forward, scores, head, waiting)


def sizes_of(layers: Layers, heads: int | None) -> tuple[Sizes, str]:
    """The sizes of a model by its layers' shapes, and what was assumed of the heads.

    Of a mixture of experts all are counted, as if each token went to each of them.
    """
    matrices = [(path, x) for path, x in layers.one if len(x.shape) > 1]
    width = _width([x for _, x in matrices])
    projected = [max(1, math.prod(x.shape) // width) for _, x in matrices]
    query, counted = _queries(matrices, width)
    outside = [x for _, x in layers.others if width in x.shape]
    outputs = [n for x in outside if (n := math.prod(x.shape) // width) > 1]
    largest = max((x for _, x in layers.one), key=lambda x: math.prod(x.shape))
    sizes = Sizes(
        layers.count,
        width,
        sum(projected),
        max(projected, default=0),
        query,
        counted if heads is None else heads,
        max(outputs, default=0),
        outputs.count(max(outputs, default=0)) < 2,
        largest.dtype.itemsize,
        _experts([x for _, x in matrices], width),
    )
    return sizes, _assumed(sizes, heads, matrices)


def _width(matrices: Sequence[jax.ShapeDtypeStruct]) -> int:
    counts = collections.Counter(n for x in matrices for n in {*x.shape})
    return max(counts, key=lambda n: (counts[n], n), default=1)


def _experts(matrices: Sequence[jax.ShapeDtypeStruct], width: int) -> int:
    stacks = [x.shape[0] for x in matrices if len(x.shape) == 3 and width in x.shape]
    scores = {
        n for x in matrices if len(x.shape) == 2 and width in x.shape for n in x.shape
    }
    routed = [n for n in stacks if n in scores and n != width]
    return max(routed, default=0) if len(routed) > 1 else 0


def _queries(matrices: Sequence[NamedShape], width: int) -> tuple[int, int]:
    for path, x in matrices:
        if _QUERY.search(path):
            query = math.prod(x.shape) // width
            # [width, heads, head], as Flax has it; [heads, width, head] of Gemma.
            axes = [n for n in x.shape if n != width]
            return query, axes[0] if len(x.shape) == 3 and axes else query // _HEAD
    return 0, 0


def _assumed(sizes: Sizes, heads: int | None, matrices: Sequence[NamedShape]) -> str:
    if heads is not None or any(
        len(x.shape) == 3 for path, x in matrices if _QUERY.search(path)
    ):
        return ""
    if not sizes.heads:
        return (
            "No matrix of queries is known by its name, so that no attention scores are"
            " counted: heads= states how many heads there are."
        )
    return (
        f"{sizes.heads} heads of {_HEAD} values are assumed: heads= states another"
        " number."
    )
