"""What every paged transformation inside another says of its moments."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from paged_optax.transform.configuration import Configuration
from paged_optax.transform.context import within
from paged_optax.transform.parameter_shardings import explicitly_typed


@dataclasses.dataclass(frozen=True)
class Moment:
    """One leaf of a paged state, as the plan places it.

    Attributes:
      path: Its path in the state.
      shape: Its shape; on a mesh, that of one device's shard.
      dtype: Its dtype.
      bytes: Its bytes, on one device or for it.
      on_host: Whether it lives in host memory.
      pages: Pages a sweep cuts it into; 1 where it travels whole; 0 on the device.
      page_bytes: Bytes of one of them.
      leaf: Moments with equal numbers travel together.
      in_flight: Pages of it that may be on the device at once: what is read and what
        is written, and what is computed in between where a codec stores it or the page
        is a whole leaf.
      beside: Bytes of its scales, where they do not go in pages but travel whole.
      refused: Why it cannot be paged on this backend although it is larger than a
        page; else empty.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    on_host: bool
    pages: int
    page_bytes: int
    leaf: int
    in_flight: int = 2
    beside: int = 0
    refused: str = ""


#: Lists what a paged `update` will do, given its extra arguments.
Describe = Callable[[dict[str, Any]], list[Moment]]


def recorded(
    tx: optax.GradientTransformation, params: optax.Params
) -> list[tuple[Configuration, Describe]]:
    """Finds every paged transformation inside `tx`: chained, masked, injected.

    Args:
      tx: The transformation; it is initialised on shapes alone.
      params: The parameters, or their `ShapeDtypeStruct`s.

    Returns:
      What each was asked for, and what lists its moments.

    Raises:
      ValueError: If nothing in `tx` is paged.
    """
    found: list[tuple[Configuration, Describe]] = []
    # A new function each time: JAX would not run one again that it has traced.
    record = lambda configuration, describe: found.append((configuration, describe))
    with within(record=record), explicitly_typed(params) as shapes:
        jax.eval_shape(tx.init, shapes)
    if not found:
        raise ValueError(
            "tx has no paged transformation inside: wrap one with paged(...), or use"
            " an alias such as paged_adamw."
        )
    return found
