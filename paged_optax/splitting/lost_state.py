"""Warnings of state whose new value the next step does not read."""

import collections
import functools
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, used_values
from paged_optax.backend.text import dtype_and_shape, keystr
from paged_optax.backend.user_warnings import warn_user
from paged_optax.splitting.dependence import source_line

#: Advice for state that changes in each step.
STATE_RECIPE = (
    "Pass state in the batch, loss(params, (state, inputs)), and return the new state"
    " beside the loss: with NNX, return value, nnx.state(model, nnx.Not(nnx.Param))."
    " The state of the next batch is then output.metrics; docs/models_with_state.md"
    " also shows Linen and Equinox. For random numbers alone a new key in each batch is"
    " enough: with NNX, begin the loss with nnx.reseed(model, dropout=batch['key']),"
    " with the streams' names (default for nnx.Rngs(0))."
)

#: Inputs that a value is computed from: bit n stands for input number n.
_Bits = int


def warn_of_lost_state(
    flat: Flat, args: Sequence[tuple[str, PyTree]], losses: int
) -> None:
    """Warns of state that no step changes, or that the optimizer would change.

    These are keys and counts of random numbers, and values of which the loss computes a
    new one that it does not return, such as running statistics. `args` are the names
    and types of params, frozen and batch. The loss has `losses` results before its
    metrics.
    """
    names, of_argument = list[str](), dict[str, _Bits]()
    for name, tree in args:
        first, leaves = len(names), jax.tree_util.tree_leaves_with_path(tree)
        names += [f"{name}{keystr(path)}" for path, _ in leaves]
        of_argument[name] = (1 << len(names)) - (1 << first)
    inputs = {*range(len(names)), *flat.constants}
    bits = {n: 1 << n for n in inputs}
    of_type = collections.defaultdict[Hashable, _Bits](int)
    for n in inputs:
        of_type[flat.aval(n)] |= bits[n]
    same_type = lambda values: _union(of_type[flat.aval(x)] for x in values)
    sources = dict(bits)
    get = lambda x: 0 if isinstance(x, Constant) else sources[x]
    renewed, draws = list[tuple[_Bits, int]](), list[tuple[_Bits, int]]()
    counted: _Bits = 0
    used = {x for e in flat.eqns for x in e.numbers} | {*used_values(flat.outputs)}
    for index, e in enumerate(flat.eqns):
        operands = [get(x) for x in e.inputs]
        sources.update(dict.fromkeys(e.outputs, union := _union(operands)))
        if e.traced is not None:
            draws += ((x, index) for x in _draws(e.traced, operands))
        if union & (union - 1):  # of several inputs
            renewed.append((union & same_type(e.outputs), index))
        elif e.primitive.name == "add" and used.isdisjoint(e.outputs):
            counted |= union & same_type(e.outputs)
    outputs = used_values(flat.outputs)
    new_values = (sources[x] & same_type([x]) & ~bits.get(x, 0) for x in outputs)
    returned = _union(new_values)
    trained, params = _union(map(get, flat.outputs[:losses])), of_argument["params"]
    # An input that is returned as it is has not its new value.
    computed = _union(sources[x] for x in outputs if x not in bits)
    read = (params & trained) | (~params & computed)
    closed = _union(bits[n] for n in flat.constants)
    # A number may be an option, such as the label of padding, that metrics depend on.
    arrays = _union(bits[n] for n in inputs if flat.avals[n].shape)
    unread = _union(x for x, _ in renewed) & ~read
    lost = arrays & (unread | closed & returned & ~trained)
    fixed = closed | (of_argument["frozen"] & ~returned)
    repeated = [(x, index) for x, index in draws if not x & ~fixed]
    # The loss counts the draws, and the next step does not read the new count.
    counted &= of_argument["batch"] & ~returned
    stale = [(x & counted, index) for x, index in draws if x & counted]
    texts = dict[str, str]()  # the first of each kind
    # The functions of `jax.random` are traced without the caller's lines.
    line = lambda index: source_line(flat.eqns[index], flat.eqns[index::-1])
    for n in sorted(inputs):
        closed_over = f"a closed-over array, {dtype_and_shape(flat.avals[n])}"
        name = names[n] if n < len(names) else closed_over
        drawn = [index for x, index in repeated if x & bits[n]]
        recounted = [index for x, index in stale if x & bits[n]]
        draws_from = "the loss draws random numbers, such as dropout masks, from"
        if drawn and not jnp.issubdtype(flat.avals[n].dtype, jnp.inexact):
            texts.setdefault(
                "random",
                f"{draws_from} {name}: a count or key that no step changes (at"
                f" {line(drawn[0])}). They are the same in each step.",
            )
        elif recounted:
            texts.setdefault(
                "random",
                f"{draws_from} {name}, and does not return the new count of them (at"
                f" {line(recounted[0])}). With the same count and key in the next batch"
                " they are the same.",
            )
        elif bits[n] & lost and "value" not in texts:
            made = [index for x, index in renewed if x & bits[n]]
            where = f" (at {line(made[-1])})" if made else ""
            texts["value"] = (
                f"the loss does not depend on {name}, and computes a new value of it,"
                f" as of a running statistic{where}. The optimizer does not train it,"
                " but may change it, for example by weight decay. With NNX give it a"
                " type that is no nnx.Param."
                if bits[n] & params
                else f"the loss computes a new value of {name}, such as a running"
                f" statistic{where}, which the next step does not read: it begins with"
                " the old one."
            )
    for text in texts.values():
        warn_user(f"{text} {STATE_RECIPE}")


def _union(sources: Iterable[_Bits]) -> _Bits:
    return functools.reduce(operator.or_, sources, 0)


def _draws(eqn: core.JaxprEqn, operands: Sequence[_Bits]) -> Iterator[_Bits]:
    """Yields the sources of the random numbers that an equation draws."""
    union = _union(operands)
    if eqn.primitive.name in ("random_bits", "random_gamma"):
        yield union
    for inner in core.jaxprs_in_params(eqn.params):
        # Calls, branches and loop bodies take the last operands.
        count = len(inner.invars)
        last = operands[-count:] if 0 < count <= len(operands) else [union] * count
        known = dict(zip(inner.invars, last, strict=True))
        for item in inner.eqns:
            values = [
                0 if isinstance(x, core.Literal) else known.get(x, 0)
                for x in item.invars
            ]
            yield from _draws(item, values)
            known.update(dict.fromkeys(item.outvars, _union(values)))
