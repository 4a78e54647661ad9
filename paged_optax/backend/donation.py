"""Which result of a compiled step takes over which donated argument.

`jax.jit` pairs them by shape and dtype, in their order. Where it was not told in which
memory the results are, it pairs a moment in host memory with a parameter: on a CPU that
ends the process, elsewhere the parameter goes to the host. (JAX says so beside the
code, `_set_up_aliases` in `mlir.py`; the memory of results is known only after it.) So
functions of states leave a mark in what is traced. When the program around it is
lowered, the mark pairs buffers anew; it does nothing else.
"""

import collections
from collections.abc import Sequence
from typing import TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from paged_optax.backend.arrays import is_traced
from paged_optax.backend.memory import PINNED_HOST

Tree = TypeVar("Tree")

_PAIR = "tf.aliasing_output"


def paired(tree: Tree) -> Tree:
    """The same arrays; the program that computes them pairs within a memory.

    Args:
      tree: Results of any kind. Without traced arrays nothing happens.
    """
    return jax.tree.map(lambda x: _pair.bind(x) if is_traced(x) else x, tree)


_pair = Primitive("pair_donated")
_pair.def_impl(lambda x: x)
_pair.def_abstract_eval(lambda type_: type_)
ad.primitive_jvps[_pair] = lambda xs, tangents: (_pair.bind(*xs), *tangents)
batching.primitive_batchers[_pair] = lambda xs, axes: (_pair.bind(*xs), *axes)


def _lower(
    context: mlir.LoweringRuleContext, *operands: "ir.Value[ir.Type]"
) -> "Sequence[ir.Value[ir.Type]]":
    module = context.module_context
    # Once a program: it has a mark for each array.
    if module.cached_primitive_lowerings.setdefault(_pair, context) is context:
        for operation in module.module.body.operations:
            if isinstance(operation, func.FuncOp) and operation.name.value == "main":
                _pair_within_memories(operation)
    return operands


mlir.register_lowering(_pair, _lower, cacheable=False)


def _pair_within_memories(main: func.FuncOp) -> None:
    """Pairs as JAX does, and by memory too, unless all its pairs are right."""
    arguments = _dicts(main.attributes["arg_attrs"])
    results = _dicts(main.attributes["res_attrs"])
    pairs = {
        i: ir.IntegerAttr(x[_PAIR]).value for i, x in enumerate(arguments) if _PAIR in x
    }
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


def _dicts(attributes: ir.Attribute) -> list[dict[str, ir.Attribute]]:
    return [
        {x.name: x.attr for x in ir.DictAttr(each)} for each in ir.ArrayAttr(attributes)
    ]


def _host(attributes: dict[str, ir.Attribute]) -> bool:
    kind = attributes.get("mhlo.memory_kind")
    return kind is not None and ir.StringAttr(kind).value == PINNED_HOST
