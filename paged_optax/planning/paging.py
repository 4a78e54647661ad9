"""How moments are paged, as `paged` takes it, and the plans of that."""

import dataclasses
import json
import warnings
from collections.abc import Mapping

import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.text import parse_bytes
from paged_optax.planning.page_plan import PagePlan, plan
from paged_optax.transform.codec_rules import Rule
from paged_optax.transform.paged import paged

Codec = Rule | Mapping[str, Rule]


@dataclasses.dataclass(frozen=True)
class Paging:
    """Arguments of `paged` that are one for all ways to train, and the link.

    Attributes:
      inner: What to page.
      page_size: As in `paged`.
      master_dtype: As in `paged`.
      master_remainders: As in `paged`.
      link: Its rate in one direction, in 10^9 bytes a second.
    """

    inner: optax.GradientTransformation
    page_size: int | str
    master_dtype: DTypeLike | None
    master_remainders: bool
    link: float

    def planned(
        self, params: PyTree, codec: Codec = None, device_budget: str | None = "0B"
    ) -> PagePlan:
        """What lives where."""
        tx = paged(
            self.inner,
            page_size=self.page_size,
            master_dtype=self.master_dtype,
            master_remainders=self.master_remainders,
            codec=codec,
            device_budget=device_budget,
        )
        with warnings.catch_warnings():
            # Of the host pool, of which the table says as much.
            warnings.filterwarnings("ignore", "the moments need", UserWarning)
            return plan(tx, params, link_gigabytes_per_second=self.link)

    def arguments(self, codec: Codec) -> str:
        """What `paged` takes beside the transformation, as code.

        A codec that is not written by name is named `codec`.
        """
        found = []
        if parse_bytes("page_size", self.page_size) != parse_bytes(
            "page_size", "16MiB"
        ):
            found += [f"page_size={json.dumps(self.page_size)}"]
        if self.master_dtype is not None:
            found += [f'master_dtype="{np.dtype(self.master_dtype)}"']
        if self.master_remainders:
            found += ["master_remainders=True"]
        if codec is not None:
            found += [f'codec="{codec}"' if isinstance(codec, str) else "codec=codec"]
        return ", ".join(found)
