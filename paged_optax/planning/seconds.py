"""Seconds of a whole step, and from how many tokens on its transfers take none."""

import dataclasses
import math

from jax.typing import DTypeLike

from paged_optax.backend.validation import check_rate
from paged_optax.planning.activations import Sizes, Workload
from paged_optax.planning.cards import Card
from paged_optax.planning.footprints import Footprint

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

    Raises:
      ValueError: If a rate, or the parameters, are not positive.
    """
    if down_gigabytes_per_second is None:
        down_gigabytes_per_second = up_gigabytes_per_second
    for name, value in (
        ("parameters", parameters),
        ("up_gigabytes_per_second", up_gigabytes_per_second),
        ("down_gigabytes_per_second", down_gigabytes_per_second),
        ("teraflops", teraflops),
        ("flops_per_parameter", flops_per_parameter),
    ):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} is not a positive number.")
    up = bytes_up / (up_gigabytes_per_second * 1e9)
    down = bytes_down / (down_gigabytes_per_second * 1e9)
    seconds = max(up, down) if both_ways else up + down
    tokens = seconds * teraflops * 1e12 / (flops_per_parameter * parameters)
    if not math.isfinite(tokens):
        raise ValueError(
            f"teraflops={teraflops} on a link of {up_gigabytes_per_second} GB/s up and"
            f" {down_gigabytes_per_second} down gives no finite number of tokens."
        )
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
        """The rates that are stated, or a card's, or 25 GB/s.

        Both directions of PCI Express carry twice what one does.

        Args:
          link: The stated rate of the link in one direction, or None.
          teraflops: The stated rate of products, or None.
          card: The card, or None.
          dtype: Of the products.

        Raises:
          ValueError: If a rate is not positive.
          TypeError: If it is no number.
        """
        both = None
        if link is None:
            link, both = (25.0, None) if card is None else (card.link, card.both_ways)
        check_rate("link_gigabytes_per_second", link)
        reached = None
        if teraflops is not None:
            check_rate("teraflops", teraflops)
            reached = teraflops, teraflops
        elif card is not None:
            products = card.products(dtype)
            reached = LEAST * products, MOST * products
        return Rates(link, both or 2 * link, reached)

    def timed(self, row: Footprint, work: int) -> Footprint:
        """A way with the seconds of its step.

        Args:
          row: The way.
          work: Operations of a step's products.
        """
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
