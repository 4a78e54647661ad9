"""Cards by name: their memory and rates."""

import dataclasses
import math

import jax
import numpy as np
from jax.typing import DTypeLike

from paged_optax.backend.validation import brief, check_rate


def machine_rate(name: str, value: int | float) -> float:
    """Checks the rate of a link, in GB/s, or of products, in TFLOP/s."""
    check_rate(name, value)
    # Outside these bounds, sums of bytes and seconds overflow.
    if not 1e-9 <= float(value) <= 1e9:
        raise ValueError(f"{name}={brief(value)} is no machine's: pass 1e-9 to 1e9.")
    return float(value)


@dataclasses.dataclass(frozen=True)
class Card:
    """Bytes of memory, GB/s of the link, TFLOP/s of dense products, and a latency."""

    memory: int
    link: float = 25.0  # in one direction; PCI Express 4
    bidirectional: float = 50.0  # both directions together
    teraflops: float = math.nan  # in bfloat16; in float16 if `bfloat16` is set
    gpu: bool = True  # False: a TPU
    bfloat16: float | None = None  # of tensor cores that support float16 only
    unified_memory: bool = False  # device and host are one memory
    # Seconds of a moment's page beyond its bytes: an H200's (jax 0.11.2), assumed of
    # other GPUs. A TPU starts its own transfers.
    latency: float = 22e-6
    # Shares of the TFLOP/s in training, at worst and at best. Large models on many
    # GPUs: 40 to 57% (Korthikanti et al., "Reducing Activation Recomputation in Large
    # Transformer Models", 2022; Touvron et al., "Llama", 2023); small models less.
    efficiency: tuple[float, float] = 0.3, 0.6

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
    "v5e": Card(_gib(15.75), *_PCIE3, 197.0, gpu=False, latency=0.0),
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
    """The tokens a step from which products hide seconds of transfers.

    A parameter takes six operations a token in a backward pass with rematerialization,
    as in `layerwise_step`.
    """
    return math.ceil(seconds * teraflops * 1e12 / (6.0 * parameters))
