"""Random transformations by an engine that is broken on purpose, as `BROKEN` says."""

import sys
from collections.abc import Callable
from typing import Any

from helpers import apart, fuzz
from paged_optax.engine.buffers import PagedBuffer
from paged_optax.engine.loop import Loop
from paged_optax.engine.paged_array import PagedArray
from paged_optax.transform import precision


def _always_the_first_page(write: Callable[..., Any]) -> Callable[..., Any]:
    first = lambda at: at._replace(start=0 * at.start, first_unit=0 * at.first_unit)
    return lambda part, x, page, at: write(part, x, page, first(at))


def _gates_not_read(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda loop, buffers, gate: call(loop, buffers, None)


def _decoded_too_much(decode: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(array: PagedArray, *arguments: Any) -> Any:
        decoded = decode(array, *arguments)
        return decoded if array.codec is None else decoded * 1.01

    return wrong


def _masters_go_on(beside: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parameter, master: (
        beside(parameter, master) if parameter.dtype == master.dtype else master
    )


#: What is broken, by name: a class or a module, its function, and what takes that
#: one's place.
BREAKAGES: apart.Breakages = {
    "always the first page": (PagedBuffer, "write", _always_the_first_page),
    "gates are not read": (Loop, "__call__", _gates_not_read),
    "codecs decode too much": (PagedArray, "decode", _decoded_too_much),
    "masters go on": (precision, "current_master", _masters_go_on),
}

if __name__ == "__main__":
    apart.break_by_name(BREAKAGES)
    sys.exit(fuzz.serve())
