"""What runs while transfers from and to the host are open, in a scheduled HLO."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

_BYTES = {"f32": 4, "bf16": 2, "s16": 2, "s32": 4, "u32": 4}
_BYTES |= {"u8": 1, "s8": 1, "pred": 1}


@dataclasses.dataclass
class Overlap:
    """Transfers between host and device in one loop's body.

    Attributes:
      products: Matrix products in the body.
      covered: Those during which a transfer is open.
      bytes: Bytes transferred, both ways.
      hidden: Bytes of the transfers that are open during a matrix product.
    """

    products: int = 0
    covered: int = 0
    bytes: int = 0
    hidden: int = 0


def overlaps(hlo: str) -> list[Overlap]:
    """One entry for each loop body that has matrix products and transfers."""
    found = []
    for text, computations in _bodies(hlo):
        result = Overlap()
        for size, count in _beside(text, functools.partial(_is_product, computations)):
            if size is None:
                result.products += 1
                result.covered += bool(count)
            else:
                result.bytes += size
                result.hidden += size if count else 0
        if result.products and result.bytes:
            found.append(result)
    return found


def reductions(hlo: str) -> list[int]:
    """For each reduction in a loop: how many transfers are open when it starts."""
    return [
        count
        for text, _ in _bodies(hlo)
        for size, count in _beside(text, _is_reduction)
        if size is None
    ]


def _bodies(hlo: str) -> Iterator[tuple[str, dict[str, str]]]:
    computations = {}
    for text in hlo.split("\n\n"):
        name = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) ", text)
        if name and "{" in text:
            computations[name[1]] = text
    for body in dict.fromkeys(re.findall(r"body=%?([\w.\-]+)", hlo)):
        if body in computations:
            yield computations[body], computations


def _beside(
    text: str, wanted: Callable[[str], bool]
) -> Iterator[tuple[int | None, int]]:
    """None for what is wanted, with how many transfers are open; and a transfer's
    bytes, with how much of that it was open for."""
    flying: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*)", line)
        if not match:
            continue
        name, rest = match[1], match[2]
        start = re.search(r" [\w\-]*-start\(", rest)
        done = re.search(r"-done\([^%]*%([\w.\-]+)", rest)
        if start and "S(5)" in rest:
            shapes = re.findall(r"(\w+)\[([\d,]+)\]", rest[: start.start()])
            sizes = [size for size in map(_size, shapes) if size > 64]
            flying[name] = min(sizes, default=0), 0
        elif done and done[1] in flying:
            yield flying.pop(done[1])
        elif wanted(rest):
            yield None, len(flying)
            flying = {name: (size, n + 1) for name, (size, n) in flying.items()}


def _is_reduction(line: str) -> bool:
    return " reduce-scatter-start(" in line or " reduce-scatter(" in line


def _size(shape: tuple[str, str]) -> int:
    size = _BYTES.get(shape[0], 4)
    for n in shape[1].split(","):
        size *= int(n)
    return size


def _is_product(computations: dict[str, str], line: str) -> bool:
    product = r" (dot|convolution)\(|cublas|gemm"
    if re.search(product, line.split("metadata=")[0]):
        return True
    called = re.search(r"calls=%?([\w.\-]+)", line)
    return bool(called and re.search(product, computations.get(called[1], "")))
