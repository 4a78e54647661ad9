"""Which transfers are open while which matrix products run, in a scheduled HLO."""

import dataclasses
import re

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "u8": 1, "s8": 1, "pred": 1}


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
    computations = {}
    for text in hlo.split("\n\n"):
        name = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) ", text)
        if name and "{" in text:
            computations[name[1]] = text
    bodies = dict.fromkeys(re.findall(r"body=%?([\w.\-]+)", hlo))
    found = [
        _overlap(computations[b], computations) for b in bodies if b in computations
    ]
    return [x for x in found if x.products and x.bytes]


def _overlap(text: str, computations: dict[str, str]) -> Overlap:
    result = Overlap()
    flying: dict[str, list[int]] = {}
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
            flying[name] = [min(sizes, default=0), 0]
        elif done and done[1] in flying:
            size, during = flying.pop(done[1])
            result.bytes += size
            result.hidden += size if during else 0
        elif _is_product(rest, computations):
            result.products += 1
            result.covered += bool(flying)
            for entry in flying.values():
                entry[1] += 1
    return result


def _size(shape: tuple[str, str]) -> int:
    size = _BYTES.get(shape[0], 4)
    for n in shape[1].split(","):
        size *= int(n)
    return size


def _is_product(line: str, computations: dict[str, str]) -> bool:
    product = r" (dot|convolution)\(|cublas|gemm"
    if re.search(product, line.split("metadata=")[0]):
        return True
    called = re.search(r"calls=%?([\w.\-]+)", line)
    return bool(called and re.search(product, computations.get(called[1], "")))
