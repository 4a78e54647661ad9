"""Seconds of a whole step, at best and at worst."""

import dataclasses

from jax.typing import DTypeLike

from paged_optax.backend.validation import check_rate
from paged_optax.planning.activations import Given, Sizes
from paged_optax.planning.cards import Card
from paged_optax.planning.footprints import Footprint

# Operations for a parameter and a token, where each layer's forward pass is computed
# twice: two for each of both, four for the gradients of weights and activations.
_OPERATIONS = 8
# Shares of the TFLOP/s on a data sheet that training reaches. Of large models on many
# GPUs: 40 to 57% (Korthikanti et al., "Reducing Activation Recomputation in Large
# Transformer Models", 2022; Touvron et al., "Llama", 2023); small ones reach less.
LEAST, MOST = 0.3, 0.6


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a machine moves and computes.

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


def operations(parameters: int, sizes: Sizes, given: Given) -> int:
    r"""Operations of a step's products.

    .. math::
        8 P n + 16 L n t q

    with :math:`P` parameters, :math:`n` tokens, and in each of :math:`L` layers queries
    of :math:`q` values a token, which are multiplied with the keys of all :math:`t`
    tokens of their sequence, and the shares with their values: four operations a pair
    and value, four times, as for the parameters.
    """
    attention = 16 * sizes.layers * given.length * sizes.query
    return given.tokens * (_OPERATIONS * parameters + attention)
