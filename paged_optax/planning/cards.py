"""Cards by name, and the seconds of a step on them."""

import dataclasses
import math

import jax
import numpy as np
from jax.typing import DTypeLike

from paged_optax.backend.validation import brief, check_rate

#: Link rate if none is stated, in 10^9 bytes a second: PCI Express 4.
DEFAULT_LINK = 25.0


def machine_rate(name: str, value: int | float) -> float:
    """Checks the rate of a link, in GB/s, or of products, in TFLOP/s."""
    check_rate(name, value)
    # Outside these bounds, sums of bytes and seconds overflow.
    if not 1e-9 <= float(value) <= 1e9:
        raise ValueError(f"{name}={brief(value)} is no machine's: pass 1e-9 to 1e9.")
    return float(value)


@dataclasses.dataclass(frozen=True)
class Card:
    """Bytes of memory, GB/s of the link and TFLOP/s of dense products of a card."""

    memory: int
    link: float  # in one direction
    bidirectional: float  # both directions together
    teraflops: float  # in bfloat16; in float16 if `bfloat16` is set
    gpu: bool = True  # False: a TPU
    bfloat16: float | None = None  # of tensor cores that support float16 only
    # Seconds of a page beyond its bytes, measured on an H200 and assumed of others.
    latency: float = 22.5e-6
    unified_memory: bool = False  # device and host are one memory

    def products(self, dtype: DTypeLike) -> float:
        """The rate of products in a dtype, in 10^12 operations a second."""
        if self.bfloat16 is None or np.dtype(dtype) == np.float16:
            return self.teraflops
        return self.bfloat16

    @property
    def advice(self) -> str:
        """The dtype to train in without bfloat16 tensor cores; empty with them."""
        if self.bfloat16 is None:
            return ""
        return (
            f"This card computes bfloat16 at {self.bfloat16:.2g} instead of"
            f" {self.teraflops:.2g} TFLOP/s, as its tensor cores know float16 alone:"
            " train in float16, clip in float32 (Optax's norm of float16 is infinite"
            ' above 256), with master_dtype="float32" and a scaled loss.'
        )


# Sixteen lanes of PCI Express 3, 4 and 5, one way and both, as data sheets state them.
_PCIE3, _PCIE4, _PCIE5 = (16.0, 32.0), (32.0, 64.0), (64.0, 128.0)


def _gib(size: float) -> int:
    return int(size * (1 << 30))


#: Memory is the least that public PyTorch logs report; `nvidia-smi` shows up to 0.9 GiB
#: more. Dense products are half of the sparse ones if a data sheet states only these.
CARDS = {
    # "NVIDIA T4 Tensor Core GPU", data sheet. Tensor cores support bfloat16 from
    # compute capability 8.0 on ("CUDA C++ Programming Guide"); single precision: 8.1.
    "t4": Card(_gib(14.56), *_PCIE3, 65.0, bfloat16=8.1),
    # "NVIDIA Ada GPU Architecture", whitepaper: 121 dense; 165.2 of the RTX 4090.
    "l4": Card(_gib(22.03), *_PCIE4, 121.0),
    # "NVIDIA Ampere GA102 GPU Architecture", whitepaper.
    "rtx3090": Card(_gib(23.56), *_PCIE4, 71.0),
    "rtx4090": Card(_gib(23.51), *_PCIE4, 165.2),
    # "NVIDIA RTX Blackwell GPU Architecture", whitepaper.
    "rtx5090": Card(_gib(31.34), *_PCIE5, 209.5),
    # "NVIDIA A100 Tensor Core GPU", data sheet.
    "a100-40": Card(_gib(39.38), *_PCIE4, 312.0),
    "a100-80": Card(_gib(79.15), *_PCIE4, 312.0),
    # "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200 ...", data sheets, SXM.
    "h100": Card(_gib(79.09), *_PCIE5, 989.5),
    "h200": Card(_gib(139.7), *_PCIE5, 989.5),
    # "DGX Spark", data sheet: 273 GB/s, of which a copy reads and writes half each; an
    # eighth of the 1000 TFLOP/s of sparse FP4.
    "gb10": Card(_gib(121.69), 136.5, 136.5, 125.0, unified_memory=True),
    # "TPU v5e", Google Cloud's documentation. PCI Express 3 is assumed: "How to Scale
    # Your Model" (Austin et al., 2025) states 15 GB/s.
    "v5e": Card(_gib(15.75), *_PCIE3, 197.0, gpu=False),
}

# `device_kind` of cards that JAX names otherwise. "NVIDIA H100 PCIe" is another card.
_DEVICE_KINDS = {
    "Tesla T4": "t4",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "DGX Spark": "gb10",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
}


#: A note on a machine with one memory.
UNIFIED_MEMORY = (
    "Device and host are one memory here, and their bytes add up: paging alone saves"
    " none of it. A codec does, and the gradients of a layerwise step. With"
    " XLA_PYTHON_CLIENT_PREALLOCATE=false a GPU leaves the host its part."
)


def _letters(name: str) -> str:
    plain = "".join(x for x in name.lower() if x.isalnum())
    return plain.removeprefix("nvidia").removeprefix("geforce").removesuffix("gb")


_NAMES = {_letters(x): card for x, card in _DEVICE_KINDS.items()} | {
    _letters(x): x for x in CARDS
}


def card_name(name: str) -> str | None:
    """The key in `CARDS` of any spelling, such as JAX's `device_kind`; or None."""
    return _NAMES.get(_letters(name))


def local_card() -> Card | None:
    """The card of this machine; None if it is not in `CARDS`."""
    return CARDS.get(card_name(jax.local_devices()[0].device_kind) or "")


def find_card(name: str) -> Card:
    """The card of a name in any spelling: `"RTX 4090"`, `"nvidia-l4"`, `"Tesla T4"`."""
    if key := card_name(name):
        return CARDS[key]
    raise ValueError(
        f"card={brief(name)} is none of {', '.join(CARDS)}: for another card state its"
        " memory, link and TFLOP/s."
    )


def free_from(parameters: int, seconds: float, teraflops: float) -> int:
    r"""The tokens a step from which products hide seconds of transfers.

    .. math::
        n = \left\lceil \frac{t F}{6 P} \right\rceil

    where :math:`P` parameters take six operations a token at :math:`F` a second in a
    backward pass with rematerialization, as in `layerwise_step`.
    """
    return math.ceil(seconds * teraflops * 1e12 / (6.0 * parameters))


# Shares of a data sheet's TFLOP/s in training. Large models on many GPUs: 40 to 57%
# (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
# 2022; Touvron et al., "Llama", 2023); small models reach less.
_LEAST, _MOST = 0.3, 0.6


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of transfers, in GB/s, and of products in training, in TFLOP/s."""

    link: float  # in one direction
    bidirectional: float  # both directions together
    teraflops: tuple[float, float] | None = None  # at worst and at best, if known

    @staticmethod
    def of(
        link: float | None, teraflops: float | None, card: Card | None, dtype: DTypeLike
    ) -> "Rates":
        """Stated rates, else those of a card for products of `dtype`."""
        reached = bidirectional = None
        if link is not None:
            link = machine_rate("link_gigabytes_per_second", link)
        elif card is not None:
            link, bidirectional = card.link, card.bidirectional
        else:
            link = DEFAULT_LINK
        if teraflops is not None:
            teraflops = machine_rate("teraflops", teraflops)
            reached = teraflops, teraflops
        elif card is not None:
            products = card.products(dtype)
            reached = _LEAST * products, _MOST * products
        return Rates(link, bidirectional or 2 * link, reached)

    def seconds(
        self, operations: int, moved: int, overlapped: bool
    ) -> tuple[float, float] | None:
        """Seconds of a step, at best and at worst; None without a rate of products.

        At best both directions transfer at the same time, and with `overlapped` beside
        products. At worst nothing overlaps.
        """
        if self.teraflops is None:
            return None
        worst, best = (operations / 1e12 / x for x in self.teraflops)
        apart, together = (moved / 1e9 / x for x in (self.link, self.bidirectional))
        lower = max(best, together) if overlapped else best + together
        return lower, worst + apart
