"""Memory, aliases and transfers of a compiled program."""

import dataclasses
import re

import jax
from jax.stages import Compiled

from paged_optax.backend.text import readable_bytes, table
from paged_optax.engine.shards import UNSHARDED

# A start that has host memory among its types: memory space 5 of a layout
# (`xla::Layout::kHostMemorySpace`).
_TRANSFER = re.compile(
    r"= .*S\(5\).* (?:copy-start|async-start|dynamic-slice-start"
    r"|dynamic-update-slice-start|fusion-start)\("
)

_STATISTICS = ("argument", "output", "alias", "temp")


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """XLA's own buffer assignment, in bytes, for one device. Prints a table.

    Attributes:
      device_arguments: Arguments in device memory.
      device_outputs: Results in device memory.
      device_aliased: Results that reuse the buffer of a donated argument.
      device_temp: Scratch.
      host_arguments: Arguments in host memory.
      host_outputs: Results in host memory.
      host_aliased: Results in host memory that reuse the buffer of a donated argument.
      host_temp: Scratch in host memory: 0, unless an array is copied whole.
      hlo: The optimized program.
      platform: The program's platform: `"cpu"`, `"gpu"` or `"tpu"`.
    """

    device_arguments: int
    device_outputs: int
    device_aliased: int
    device_temp: int
    host_arguments: int
    host_outputs: int
    host_aliased: int
    host_temp: int
    hlo: str = dataclasses.field(default="", repr=False)
    platform: str = ""

    @classmethod
    def create(cls, stats: object, hlo: str, platform: str) -> "MemoryReport":
        """Reads XLA's `CompiledMemoryStats` and the text of a platform's program."""
        names = [space + name for space in ("", "host_") for name in _STATISTICS]
        sizes = [int(getattr(stats, f"{name}_size_in_bytes")) for name in names]
        return cls(*sizes, hlo=hlo, platform=platform)

    @property
    def device_total(self) -> int:
        """Peak device bytes: arguments, results that alias none of them, scratch."""
        results = self.device_outputs - self.device_aliased
        return self.device_arguments + results + self.device_temp

    @property
    def host_total(self) -> int:
        """Peak host bytes: arguments, results that alias none of them, scratch."""
        return (
            self.host_arguments + self.host_outputs - self.host_aliased + self.host_temp
        )

    @property
    def transfers(self) -> int:
        """The number of asynchronous copies to or from host memory in the program."""
        return len(_TRANSFER.findall(self.hlo))

    @property
    def host_known(self) -> bool:
        """True unless the backend, as XLA:CPU, does not distinguish host memory."""
        return self.platform != "cpu"

    @property
    def unsharded(self) -> bool:
        """True if a program of several devices pages leaves of unknown sharding.

        XLA gathers their pages from all devices.
        """
        return (
            bool(re.search(r"num_partitions=(?!1\b)", self.hlo))
            and UNSHARDED in self.hlo
        )

    def __str__(self) -> str:
        names = ("arguments", "outputs", "aliased", "temp", "total")
        sizes = lambda space: [
            readable_bytes(getattr(self, f"{space}_{name}")) for name in names
        ]
        if self.host_known:
            rows = [(space, *sizes(space)) for space in ("device", "host")]
            notes = [f"transfers in the program: {self.transfers}"]
        else:
            rows = [("all memory", *sizes("device"))]
            notes = ["This backend does not tell host from device memory."]
        if self.unsharded:
            notes.append(
                "Paging fell back: the shardings of some parameters are not known here,"
                " and XLA gathers\ntheir pages. Compile the step by jit_step, pass"
                " paged(..., shardings=...), make the state\nwith tx.init on the"
                " sharded parameters, or use a mesh of explicit axes."
            )
        header = ("memory", *names[:3], "scratch", "peak")
        return "\n\n".join((table(header, rows), *notes))


def memory_report(compiled: Compiled) -> MemoryReport:
    """Returns the memory that XLA assigned to a compiled step.

    Args:
      compiled: The result of `jax.jit(step).lower(...).compile()`, or the attribute
        `compiled` of a `jit_step`.

    Returns:
      Device and host bytes, aliases, transfers; it prints a table.

    Raises:
      TypeError: If `compiled` is not a compiled program.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(256)).compile()
      >>> po.memory_report(compiled).device_arguments
      1024
    """
    if not hasattr(compiled, "memory_analysis"):
        raise TypeError(
            f"memory_report takes a compiled step, not {type(compiled).__name__}: pass"
            " jax.jit(step).lower(...).compile(), or jit_step(...).compiled."
        )
    shardings = jax.tree.leaves(compiled.output_shardings)
    platforms = {device.platform for x in shardings for device in x.device_set}
    text, platform = compiled.as_text() or "", min(platforms, default="")
    return MemoryReport.create(compiled.memory_analysis(), text, platform)


def device_total(compiled: Compiled) -> int:
    """Peak device bytes, without the program's text, which takes seconds if large."""
    return MemoryReport.create(compiled.memory_analysis(), "", "").device_total
