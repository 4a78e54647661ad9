"""Facts on which all processes of a training must agree."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence

import jax
from jaxtyping import PyTree

from paged_optax.analysis.program import Analysis, Constant, Program
from paged_optax.backend.memory import on_host
from paged_optax.backend.text import dtype_and_shape, keystr
from paged_optax.backend.types import ArrayOrShape
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import paths_of

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
    configuration, (paths, leaves) = paged.configuration, paths_of(params)
    settings = {
        "page_size": configuration.page_size,
        "device_budget": configuration.device_budget,
        "min_paged_size": configuration.min_paged_size,
        "host_memory_kind": configuration.host_memory_kind,
        "per_parameter_steps": paged.per_parameter_steps,
    }
    programs = (
        analysis.shared.program,
        *(leaf.program for leaf in analysis.leaf_updates),
    )
    # Leaves of one shape have equal programs.
    distinct = list(dict.fromkeys((*programs, analysis.tail.program)))
    return {
        **{name: {"": str(value)} for name, value in settings.items()},
        # The text of a codec has the address of its object.
        "codec": {
            repr([key]): re.sub(r" at 0x[0-9a-f]+", "", repr(rule))
            for key, rule in paged.rules.items()
        },
        "parameter ": {
            keystr(path): _typed(x) for path, x in zip(paths, leaves, strict=True)
        },
        "how they are divided, ": {
            keystr(path): f"{each.spec} over {dict(each.mesh.shape)}"
            for path, each in zip(paths, layout.parameter_shards, strict=True)
            if each
        },
        "state": {keystr(p): _typed(x) for p, x in zip(*paths_of(state), strict=True)},
        "constant ": dict.fromkeys(_constants(distinct), "in the transformation"),
        "what it computes": {"": _operations(distinct)},
    }


def _typed(x: ArrayOrShape) -> str:
    kind = dtype_and_shape(jax.typeof(x))
    return f"{kind} on the host" if on_host(x) else kind


def _constants(programs: Sequence[Program]) -> Iterator[str]:
    for program in programs:
        for equation in program.equations:
            for x in (*equation.inputs, *program.outputs):
                if isinstance(x, Constant):
                    yield str(x.value)


def _operations(programs: Sequence[Program]) -> str:
    names = [x.primitive.name for program in programs for x in program.equations]
    return f"{len(names)} operations, {zlib.crc32(' '.join(names).encode()):08x}"
