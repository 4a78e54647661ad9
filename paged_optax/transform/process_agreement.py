"""Facts on which all processes of a training must agree."""

import re
import zlib
from collections.abc import Mapping

import jax
from jaxtyping import PyTree

from paged_optax.analysis.program import Analysis, Constant
from paged_optax.backend.memory import on_host
from paged_optax.backend.text import dtype_and_shape, keystr
from paged_optax.backend.types import ArrayOrShape
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import leaf_paths

#: Facts by name and path; see `backend.processes.compare`.
Said = Mapping[str, Mapping[str, str]]


def said_of(
    paged: PagedTransformation,
    params: PyTree[ArrayOrShape],
    state: PyTree[ArrayOrShape],
    layout: StateLayout,
    analysis: Analysis,
) -> Said:
    """Returns the facts on which the program of a paged update depends."""
    paths, leaves = leaf_paths(params)
    settings = (
        "page_size device_budget min_paged_size host_memory_kind per_parameter_steps"
    ).split()
    of_leaves = (leaf.program for leaf in analysis.leaf_updates)
    programs = analysis.shared.program, *of_leaves, analysis.tail.program
    distinct = dict.fromkeys(programs)  # leaves of one shape have equal programs
    eqns = [x for program in distinct for x in program.eqns]
    operands = [x for one in eqns for x in one.inputs]
    operands += [x for program in distinct for x in program.outputs]
    constants = [str(x.value) for x in operands if isinstance(x, Constant)]
    names = [x.primitive.name for x in eqns]
    return {
        **{name: {"": str(getattr(paged, name))} for name in settings},
        # The text of a codec has the address of its object.
        "codec": {
            repr([key]): re.sub(r" at 0x[0-9a-f]+", "", repr(rule))
            for key, rule in paged.rules.items()
        },
        "parameter ": {
            keystr(path): _typed(x) for path, x in zip(paths, leaves, strict=True)
        },
        "how they are divided, ": {
            keystr(path): f"{item.spec} over {dict(item.mesh.shape)}"
            for path, item in zip(paths, layout.parameter_shards, strict=True)
            if item
        },
        "state": {
            keystr(p): _typed(x) for p, x in zip(*leaf_paths(state), strict=True)
        },
        "constant ": dict.fromkeys(constants, "in the transformation"),
        "what it computes": {
            "": f"{len(names)} operations, {zlib.crc32(' '.join(names).encode()):08x}"
        },
    }


def _typed(x: ArrayOrShape) -> str:
    kind = dtype_and_shape(jax.typeof(x))
    return f"{kind} on the host" if on_host(x) else kind
