"""Finds every paged transformation inside another, and what describes its moments."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import optax
from jaxtyping import PyTree

from paged_optax.backend.types import Transformation
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
      bytes: Its bytes, or those of one device's shard.
      on_host: Whether it lives in host memory.
      pages: Pages that a sweep cuts it into; 1 if it travels whole; 0 on the device.
      page_bytes: Bytes of one of them.
      leaf: Moments with equal numbers travel together.
      in_flight: Pages of it that may be on the device at once. Two are read and
        written; a third is computed in between if a codec stores the moment, or if the
        page is a whole leaf. On a GPU the only moment of a parameter has three, or four
        if it travels both ways. The widest has one more where narrower ones are
        converted to what it holds.
      beside: Bytes of its scales or codes, if these travel whole and not in pages.
      refused: Why it cannot be paged on this backend although it is larger than a
        page, and what to do; empty if it can.
      both_ways: Whether one page of it is read while another is written.
      small: Whether it stays on the device because it is under `min_paged_size`.
      elementwise: Whether its update is computed element by element.
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
    both_ways: bool = False
    small: bool = False
    elementwise: bool = True

    @property
    def stays(self) -> str:
        """Why it stays on the device, in a word; `"-"` if it does not have to."""
        return "cannot be paged" if self.refused else "small" if self.small else "-"


#: Describes the moments of a paged transformation, given `update`'s extra arguments.
Describe = Callable[[Mapping[str, PyTree]], list[Moment]]


def recorded(
    tx: Transformation, params: optax.Params
) -> list[tuple[Configuration, Describe]]:
    """Finds every paged transformation inside `tx`: chained, masked, injected.

    Args:
      tx: The transformation; it is initialised on shapes alone.
      params: The parameters, or their `ShapeDtypeStruct`s.

    Returns:
      For each its configuration, and the function that describes its moments.

    Raises:
      ValueError: If nothing in `tx` is paged.
    """
    found: list[tuple[Configuration, Describe]] = []
    # New functions each time: JAX does not trace the same one twice in one context, and
    # keeps what it traced, context and all, as long as the function.
    record = lambda configuration, describe: found.append((configuration, describe))
    init = lambda params: tx.init(params)
    with within(types_only=True, record=record), explicitly_typed(params) as shapes:
        jax.eval_shape(init, shapes)
    if not found:
        raise ValueError(
            "tx has no paged transformation inside: wrap one with paged(...), or use"
            " an alias such as paged_adamw."
        )
    return found
