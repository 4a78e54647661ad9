"""Warnings of state among frozen parameters, which no step changes."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant
from paged_optax.backend.flax_variables import running_statistics
from paged_optax.backend.text import keystr
from paged_optax.backend.user_warnings import warn_user

#: Advice for state that changes in each step.
STATE_RECIPE = (
    "Pass state in the batch, loss(params, (state, inputs)), and return the new state"
    " beside the loss: with NNX, return value, nnx.state(model, nnx.Not(nnx.Param))."
    " The state of the next batch is then output.metrics; docs/models_with_state.md"
    " also shows Linen and Equinox. For random numbers alone a new key in each batch is"
    " enough: with NNX, begin the loss with nnx.reseed(model, dropout=batch['key']),"
    " with the streams' names (default for nnx.Rngs(0))."
)

#: Numbers of the inputs that a value is computed from.
_Sources = frozenset[int]
_NONE: _Sources = frozenset()


def warn_of_lost_state(flat: Flat, first: int, frozen: PyTree) -> None:
    """Warns of keys, counts and running statistics that the loss does not return.

    Args:
      flat: The loss.
      first: The number of arguments before the frozen ones.
      frozen: The types of the frozen arguments.
    """
    leaves = jax.tree_util.tree_leaves_with_path(frozen)
    if not leaves:
        return
    numbers = range(first, first + len(leaves))
    computed: dict[int, _Sources] = dict.fromkeys(flat.constants, _NONE)
    # -1 stands for all other inputs.
    sources = lambda x: computed.get(x, frozenset([x if x in numbers else -1]))
    draws: list[_Sources] = []
    for e in flat.eqns:
        operands = [_NONE if isinstance(x, Constant) else sources(x) for x in e.inputs]
        draws += () if e.traced is None else _draws(e.traced, operands)
        computed.update(dict.fromkeys(e.outputs, _NONE.union(*operands)))
    outputs = [x for x in flat.outputs if not isinstance(x, Constant)]
    kind = lambda x: (flat.avals[x].shape, flat.avals[x].dtype)
    is_new = lambda n: any(
        x != n and n in sources(x) and kind(x) == kind(n) for x in outputs
    )
    returned = frozenset(filter(is_new, numbers))
    fixed = frozenset(numbers) - returned
    repeated = _NONE.union(*(x for x in draws if x <= fixed))
    read = _NONE.union(*map(sources, outputs))
    statistics = {path for path, _ in running_statistics(frozen)}
    for n, (path, x) in zip(numbers, leaves, strict=True):
        name, text = f"frozen{keystr(path)}", ""
        if n in repeated and not jnp.issubdtype(x.dtype, jnp.inexact):
            text = (
                f"the loss draws random numbers, such as dropout masks, from {name}, a"
                " count or key that no step changes. They are the same in each step."
            )
        elif path in statistics and n not in read:
            text = (
                f"the loss does not return the new value of {name}, a running"
                " statistic. It is the same in each step."
            )
        if text:
            warn_user(f"{text} {STATE_RECIPE}")
            return


def _draws(eqn: core.JaxprEqn, operands: Sequence[_Sources]) -> Iterator[_Sources]:
    """Yields the sources of the random numbers that an equation draws."""
    union = _NONE.union(*operands)
    if eqn.primitive.name in ("random_bits", "random_gamma"):
        yield union
    for inner in core.jaxprs_in_params(eqn.params):
        # Calls, branches and loop bodies take the last operands.
        count = len(inner.invars)
        last = operands[-count:] if 0 < count <= len(operands) else [union] * count
        known = dict(zip(inner.invars, last, strict=True))
        for item in inner.eqns:
            values = [
                _NONE if isinstance(x, core.Literal) else known.get(x, _NONE)
                for x in item.invars
            ]
            yield from _draws(item, values)
            known.update(dict.fromkeys(item.outvars, _NONE.union(*values)))
