"""Cards by name: memory, link and rate of products, as their makers state them."""

import dataclasses
import difflib

from paged_optax.backend.given import shown


@dataclasses.dataclass(frozen=True)
class Card:
    """What the data sheet of an accelerator says.

    Attributes:
      memory: Bytes of its memory.
      link: The rate between host and device in one direction, in 10^9 bytes a second.
      both_ways: The rate of both directions at once, together.
      teraflops: Dense products in bfloat16 that are summed in float32, in 10^12
        operations a second; of a T4, which has no bfloat16, in float16.
      gpu: Whether it is one, of which JAX takes a share, and no TPU.
    """

    memory: int
    link: float
    both_ways: float
    teraflops: float
    gpu: bool = True


_GIB = 1 << 30
# Sixteen lanes of PCI Express 3, 4 and 5, one way and both: data sheets round to these.
_PCIE3, _PCIE4, _PCIE5 = (16.0, 32.0), (32.0, 64.0), (64.0, 128.0)

#: Memory is what the driver shows. A maker's GB is a GiB here; on cards with GDDR6 that
#: correct errors a sixteenth is taken for that. Where a document states products of
#: sparse matrices, dense ones are half.
CARDS = {
    # "NVIDIA T4 Tensor Core GPU", data sheet: 16 GB, 32 GB/s both ways, 65 TFLOPS.
    "t4": Card(15 * _GIB, *_PCIE3, 65.0),
    # "NVIDIA L4 Tensor Core GPU", data sheet: 24 GB, 64 GB/s both ways, 242 sparse.
    "l4": Card(45 * _GIB // 2, *_PCIE4, 121.0),
    # "NVIDIA Ampere GA102 GPU Architecture", whitepaper, the table of the RTX 3090.
    "rtx3090": Card(24 * _GIB, *_PCIE4, 71.0),
    # "NVIDIA Ada GPU Architecture", whitepaper, the table of the RTX 4090.
    "rtx4090": Card(24 * _GIB, *_PCIE4, 165.2),
    # "NVIDIA RTX Blackwell GPU Architecture", whitepaper, the table of the RTX 5090.
    "rtx5090": Card(32 * _GIB, *_PCIE5, 209.5),
    # "NVIDIA A100 Tensor Core GPU", data sheet: 64 GB/s both ways, 312 TFLOPS.
    "a100-40": Card(40 * _GIB, *_PCIE4, 312.0),
    "a100-80": Card(80 * _GIB, *_PCIE4, 312.0),
    # "NVIDIA H100 Tensor Core GPU", data sheet, SXM: 128 GB/s both ways, 1979 sparse.
    "h100": Card(80 * _GIB, *_PCIE5, 989.5),
    # "NVIDIA H200 Tensor Core GPU", data sheet, SXM: 141 GB, of which 140.4 GiB show.
    "h200": Card(140 * _GIB, *_PCIE5, 989.5),
    # "TPU v5e", Google Cloud's documentation: 16 GB, 197 TFLOPS. It states no link: PCI
    # Express 3 is assumed.
    "v5e": Card(16 * _GIB, *_PCIE3, 197.0, gpu=False),
}


def find_card(name: str, argument: str = "card") -> Card:
    """The card of a name.

    Args:
      name: One of `CARDS`, however it is spelled: `"RTX 4090"`, `"nvidia-l4"`.
      argument: What the name is an argument of, for the message.

    Raises:
      ValueError: If there is no such card. It names the nearest.

    Example:
      >>> find_card("RTX 4090").teraflops
      165.2
    """
    known = {_letters(x): x for x in CARDS}
    written = _letters(name) if isinstance(name, str) else ""
    if written in known:
        return CARDS[known[written]]
    close = difflib.get_close_matches(written, known, n=2, cutoff=0.5)
    guess = f" Did you mean {' or '.join(known[x] for x in close)}?" if close else ""
    raise ValueError(
        f"{argument}={shown(name)} is none of {', '.join(CARDS)}.{guess} For another"
        " card state its memory, link and TFLOP/s."
    )


def _letters(name: str) -> str:
    """Its letters and digits, without whose it is, and without a unit."""
    plain = "".join(x for x in name.lower() if x.isalnum())
    return plain.removeprefix("nvidia").removeprefix("geforce").removesuffix("gb")
