"""Cards by name, and the seconds of a step by a card's memory, link and products."""

import dataclasses
import difflib
import math
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from paged_optax.backend.validation import brief, check_rate
from paged_optax.planning.footprints import Footprint
from paged_optax.planning.layers import Sizes, Workload


def machine_rate(name: str, value: object) -> float:
    """The rate of a link, in GB/s, or of products, in TFLOP/s."""
    check_rate(name, value)
    number: Any = value.item() if isinstance(value, np.generic) else value
    # Beyond, sums of bytes and seconds are no finite numbers.
    if not 1e-9 <= number <= 1e9:
        raise ValueError(f"{name}={brief(value)} is no machine's: pass 1e-9 to 1e9.")
    return float(number)


@dataclasses.dataclass(frozen=True)
class Card:
    """What an accelerator has.

    Attributes:
      memory: Bytes of its memory.
      link: The rate between host and device in one direction, in 10^9 bytes a second.
      both_ways: The rate of both directions at once, together.
      teraflops: Dense products in bfloat16 that are summed in float32, in 10^12
        operations a second; of a T4, which has no bfloat16, in float16.
      gpu: Whether it is one, of which JAX takes a share, and no TPU.
      bfloat16: Products in bfloat16, and in float32, of a card whose tensor cores know
        float16 alone. None: `teraflops` stands for all.
      host_memory: Bytes of the machine's memory that are free, or None: not known.
    """

    memory: int
    link: float
    both_ways: float
    teraflops: float
    gpu: bool = True
    bfloat16: float | None = None
    host_memory: int | None = None

    def __post_init__(self) -> None:
        for name in ("link", "both_ways", "teraflops", "bfloat16"):
            if getattr(self, name) is not None or name != "bfloat16":
                machine_rate(name, getattr(self, name))

    def products(self, dtype: DTypeLike) -> float:
        """The rate of products in a dtype, in 10^12 operations a second."""
        if self.bfloat16 is None or np.dtype(dtype) == np.float16:
            return self.teraflops
        return self.bfloat16

    @property
    def advice(self) -> str:
        """What to train in where the tensor cores know no bfloat16; empty elsewhere."""
        if self.bfloat16 is None:
            return ""
        return (
            f"This card computes bfloat16 at {self.bfloat16:.2g} instead of"
            f" {self.teraflops:.2g} TFLOP/s, as its tensor cores know float16 alone:"
            " train in float16, clip in float32 (Optax's norm of float16 is infinite"
            ' above 256), with master_dtype="float32" and a scaled loss.'
        )


# Sixteen lanes of PCI Express 3, 4 and 5, one way and both: data sheets round to these.
_PCIE3, _PCIE4, _PCIE5 = (16.0, 32.0), (32.0, 64.0), (64.0, 128.0)


#: The rate of a link of which nothing is stated, in 10^9 bytes a second: of PCIe 4.
DEFAULT_LINK = 25.0


def _gib(number: float) -> int:
    return int(number * (1 << 30))


#: Memory is what CUDA has on Linux, the least that public logs of PyTorch show;
#: `nvidia-smi` shows up to 0.9 GiB more. NVIDIA's documents were read as public notes
#: quote them. Where one states only products of sparse matrices, dense ones are half.
CARDS = {
    # "NVIDIA T4 Tensor Core GPU", data sheet: 16 GB, 32 GB/s both ways, 65 TFLOPS.
    # Logs have 14.56 to 14.76 GiB, `nvidia-smi` 15360 MiB. Single precision: 8.1. Its
    # tensor cores, of compute capability 7.5, know float16 and no bfloat16 ("CUDA C++
    # Programming Guide", arithmetic by compute capability: from 8.0 on).
    "t4": Card(_gib(14.56), *_PCIE3, 65.0, bfloat16=8.1),
    # "NVIDIA L4", product page: 24 GB, PCI Express 4 with 64 GB/s. "NVIDIA Ada GPU
    # Architecture", whitepaper: 121 dense and 242 sparse. Logs have 22.03 to 22.16 GiB,
    # `nvidia-smi` 23034 MiB.
    "l4": Card(_gib(22.03), *_PCIE4, 121.0),
    # "NVIDIA Ampere GA102 GPU Architecture", whitepaper: 64 GB/s both ways, and 71 for
    # the RTX 3090; the one of RTX Blackwell has 71.2. Logs have 23.56 to 23.69 GiB,
    # `nvidia-smi` 24576 MiB.
    "rtx3090": Card(_gib(23.56), *_PCIE4, 71.0),
    # "NVIDIA Ada GPU Architecture", whitepaper: 165.2 dense and 330.4 sparse. Logs have
    # 23.51 to 23.68 GiB, `nvidia-smi` 24564 MiB.
    "rtx4090": Card(_gib(23.51), *_PCIE4, 165.2),
    # "NVIDIA RTX Blackwell GPU Architecture", whitepaper: 209.5 dense and 419 sparse.
    # Logs have 31.34 to 31.37 GiB, `nvidia-smi` 32607 MiB.
    "rtx5090": Card(_gib(31.34), *_PCIE5, 209.5),
    # "NVIDIA A100 Tensor Core GPU", data sheet: 64 GB/s both ways, 312 TFLOPS. Logs
    # have 39.38 to 39.59 GiB and 79.15 GiB, `nvidia-smi` 40960 and 81920 MiB.
    "a100-40": Card(_gib(39.38), *_PCIE4, 312.0),
    "a100-80": Card(_gib(79.15), *_PCIE4, 312.0),
    # "NVIDIA H100 Tensor Core GPU", data sheet, SXM: 128 GB/s both ways, 1979 sparse.
    # Logs have 79.09 to 79.19 GiB, `nvidia-smi` 81559 MiB.
    "h100": Card(_gib(79.09), *_PCIE5, 989.5),
    # "NVIDIA H200 Tensor Core GPU", data sheet, SXM: 141 GB, 128 GB/s both ways, 1979
    # sparse. Logs have 139.7 to 139.81 GiB, `nvidia-smi` 143771 MiB.
    "h200": Card(_gib(139.7), *_PCIE5, 989.5),
    # "TPU v5e", Google Cloud's documentation: 16 GB, 197 TFLOPS. It states no link. PCI
    # Express 3 is assumed and not confirmed: "How to Scale Your Model" (Austin et al.,
    # 2025) takes 15 GB/s. XLA's messages have 15.75 GiB.
    "v5e": Card(_gib(15.75), *_PCIE3, 197.0, gpu=False),
}

# As JAX's `device_kind` has them, of devices whose name is not simply the card's. An
# "NVIDIA H100 PCIe" is another card, as those of laptops are.
_REPORTED = {
    "Tesla T4": "t4",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
}


def card_name(name: str) -> str | None:
    """The name in `CARDS` of a card, however it is spelled; None if it is not there.

    JAX's `device_kind` is a spelling too.
    """
    known = {_letters(x): x for x in CARDS}
    known |= {_letters(x): card for x, card in _REPORTED.items()}
    return known.get(_letters(name))


def find_card(name: str | Card, argument: str = "card") -> Card:
    """The card of a name, however it is spelled; or a card itself.

    Args:
      name: One of `CARDS`: `"RTX 4090"`, `"nvidia-l4"`, or as JAX reports it,
        `"Tesla T4"`.
      argument: What the name is an argument of, for the message.
    """
    if isinstance(name, Card):
        return name
    if isinstance(name, str) and (match := card_name(name)):
        return CARDS[match]
    known = {_letters(x): x for x in CARDS}
    written = _letters(name) if isinstance(name, str) else ""
    close = difflib.get_close_matches(written, known, n=2, cutoff=0.5)
    guess = f" Did you mean {' or '.join(known[x] for x in close)}?" if close else ""
    raise ValueError(
        f"{argument}={brief(name)} is none of {', '.join(CARDS)}.{guess} For another"
        " card state its memory, link and TFLOP/s."
    )


def _letters(name: str) -> str:
    plain = "".join(x for x in name.lower() if x.isalnum())
    return plain.removeprefix("nvidia").removeprefix("geforce").removesuffix("gb")


# Operations a parameter and token of a backward pass that computes activations again:
# two for those, four for the gradients. The two of the forward pass come before the
# first gradient, so that no update travels beside them.
_BACKWARD = 6.0


def free_from(
    parameters: int,
    bytes_up: int,
    bytes_down: int,
    *,
    up_gigabytes_per_second: float,
    down_gigabytes_per_second: float | None = None,
    teraflops: float,
    flops_per_parameter: float = _BACKWARD,
    both_ways: bool = True,
) -> int:
    r"""The tokens a step from which paging is free.

    Transfers are hidden by the products that are computed meanwhile:

    .. math::
        n = \left\lceil \frac{t F}{k P} \right\rceil, \qquad
        t = \max(b_\uparrow / r_\uparrow, b_\downarrow / r_\downarrow)

    where :math:`P` parameters take :math:`k` operations a token at :math:`F` a second.
    On a link that works in one direction at a time, :math:`t` is the sum of both.

    Args:
      parameters: How many parameters a token is multiplied with.
      bytes_up: Bytes a step to the device.
      bytes_down: Bytes a step to the host.
      up_gigabytes_per_second: The link's rate to the device, in 10^9 bytes.
      down_gigabytes_per_second: Its rate to the host; None: the same.
      teraflops: 10^12 operations of products a second that training reaches.
      flops_per_parameter: Operations for a parameter and a token beside which bytes
        travel. 6: those of a backward pass with rematerialisation, as in
        `layerwise_step`; 8: those of the whole step.
      both_ways: Whether bytes travel both ways at once.

    Returns:
      The tokens of all sequences of a step, on one device.
    """
    down = down_gigabytes_per_second
    down = up_gigabytes_per_second if down is None else down
    up_rate = machine_rate("up_gigabytes_per_second", up_gigabytes_per_second)
    down_rate = machine_rate("down_gigabytes_per_second", down)
    products = machine_rate("teraflops", teraflops)
    check_rate("parameters", parameters)
    check_rate("flops_per_parameter", flops_per_parameter)
    up, down = bytes_up / (up_rate * 1e9), bytes_down / (down_rate * 1e9)
    seconds = max(up, down) if both_ways else up + down
    tokens = seconds * products * 1e12 / (flops_per_parameter * parameters)
    return math.ceil(tokens)


# Operations for a parameter and a token, where each layer's forward pass is computed
# twice: two for each of both, four for the gradients of weights and activations.
_OPERATIONS = 8
# Shares of the TFLOP/s on a data sheet that training reaches. Of large models on many
# GPUs: 40 to 57% (Korthikanti et al., "Reducing Activation Recomputation in Large
# Transformer Models", 2022; Touvron et al., "Llama", 2023); small ones reach less.
LEAST, MOST = 0.3, 0.6


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates at which a machine moves bytes and computes products.

    Attributes:
      link: In one direction, in 10^9 bytes a second.
      both_ways: In both directions at once, together.
      teraflops: Products that training reaches, at worst and at best, in 10^12
        operations a second; None if nobody stated them.
    """

    link: float
    both_ways: float
    teraflops: tuple[float, float] | None = None

    @staticmethod
    def of(
        link: float | None,
        teraflops: float | None,
        card: Card | None,
        dtype: DTypeLike,
    ) -> "Rates":
        """The rates that are stated, or a card's, or 25 GB/s; `dtype` is products'."""
        both = None
        if link is None:
            link = DEFAULT_LINK if card is None else card.link
            both = None if card is None else card.both_ways
        link = machine_rate("link_gigabytes_per_second", link)
        reached = None
        if teraflops is not None:
            least = most = machine_rate("teraflops", teraflops)
            reached = least, most
        elif card is not None:
            products = card.products(dtype)
            reached = LEAST * products, MOST * products
        # Both directions of PCI Express carry twice what one does.
        return Rates(link, both or 2 * link, reached)

    def timed(self, row: Footprint, work: int) -> Footprint:
        """A way with the seconds of its step, whose products are so many operations."""
        if self.teraflops is None:
            return row
        worst, best = (work / 1e12 / x for x in self.teraflops)
        apart, together = (row.moved / 1e9 / x for x in (self.link, self.both_ways))
        # Layerwise, moments and weights travel beside products, as far as there are
        # enough of these. Elsewhere all gradients are there before the first moment is.
        least = max(best, together) if row.by_layers else best + together
        return dataclasses.replace(row, seconds=(least, worst + apart))


def operations(parameters: int, sizes: Sizes, workload: Workload) -> int:
    r"""Operations of a step's products.

    .. math::
        8 P n + 16 L n t q

    with :math:`P` parameters, :math:`n` tokens, and in each of :math:`L` layers queries
    of :math:`q` values a token, which are multiplied with the keys of all :math:`t`
    tokens of their sequence, and the shares with their values: four operations a pair
    and value, four times, as for the parameters.
    """
    attention = 16 * sizes.layers * workload.length * sizes.query
    return workload.tokens * (_OPERATIONS * parameters + attention)
