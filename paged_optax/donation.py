"""Which result of a compiled step takes over which donated argument.

`jax.jit` pairs them by shape and dtype, in their order. Where it was not told in which
memory the results are, it pairs a moment in host memory with a parameter: on a CPU that
ends the process, elsewhere the parameter goes to the host. (JAX says so beside the
code, `_set_up_aliases` in `mlir.py`; the memory of results is known only after it.) So
`update` leaves a mark in what is traced, which does nothing but pair anew when the
program around it is lowered.
"""

import collections
from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir

from paged_optax.memory import PINNED_HOST

_PAIR = "tf.aliasing_output"


def paired(numbers: Sequence[Array]) -> tuple[Array, ...]:
    """The same arrays; the program that computes them pairs within a memory.

    Args:
      numbers: Any arrays that an update computes with.
    """
    if not any(isinstance(x, Tracer) for x in numbers):
        return tuple(numbers)
    return tuple(_paired.bind(*numbers))


_paired = Primitive("pair_donated")
_paired.multiple_results = True
_paired.def_impl(lambda *numbers: list(numbers))
_paired.def_abstract_eval(lambda *types: list(types))


def _lower(context: mlir.LoweringRuleContext, *operands: Any) -> Sequence[Any]:
    for operation in context.module_context.module.body.operations:
        if ir.StringAttr(operation.attributes["sym_name"]).value == "main":
            _pair_within_memories(operation)
    return operands


mlir.register_lowering(_paired, _lower, cacheable=False)


def _pair_within_memories(main: Any) -> None:
    """Pairs as JAX does, and by memory too, if a pair is of two memories."""
    arguments = [_dict(x) for x in main.attributes["arg_attrs"]]
    results = [_dict(x) for x in main.attributes["res_attrs"]]
    pairs = {i: int(x[_PAIR]) for i, x in enumerate(arguments) if _PAIR in x}
    if all(_host(arguments[i]) == _host(results[k]) for i, k in pairs.items()):
        return
    signature = main.type
    donors = collections.defaultdict(collections.deque)
    for i in pairs:
        donors[signature.inputs[i], _host(arguments[i])].append(i)
        del arguments[i][_PAIR]
    number = ir.IntegerType.get_signless(32)
    for k, (type_, attributes) in enumerate(
        zip(signature.results, results, strict=True)
    ):
        if waiting := donors[type_, _host(attributes)]:
            arguments[waiting.popleft()][_PAIR] = ir.IntegerAttr.get(number, k)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [ir.DictAttr.get(x) for x in arguments]
    )


def _dict(attributes: Any) -> dict[str, Any]:
    return {x.name: x.attr for x in ir.DictAttr(attributes)}


def _host(attributes: dict[str, Any]) -> bool:
    kind = attributes.get("mhlo.memory_kind")
    return kind is not None and ir.StringAttr(kind).value == PINNED_HOST
