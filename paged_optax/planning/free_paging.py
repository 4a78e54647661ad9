"""From how many tokens a step its transfers take no time of their own."""

import math

# What a backward pass computes that makes a layer's activations anew: two operations a
# parameter and token for those, four for the gradients. The two of the forward pass
# come before the first gradient, so that no update travels beside them.
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

    What travels is hidden by what is computed beside it:

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

    Example:
      >>> free_from(
      ...     8_030_000_000,
      ...     48_400_000_000,
      ...     48_400_000_000,
      ...     up_gigabytes_per_second=55.0,
      ...     teraflops=600.0,
      ... )
      10959
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
