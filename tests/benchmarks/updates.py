"""The update's time and memory: resident, whole-tree offload, paged.

All contestants compute the same function of the same state, so there is one state:
it is moved to where a contestant keeps it, outside the time measured, and handed on.
They take turns, in an order that turns around each time, and a ratio compares turns
of one round. Gradients and state are donated; updates become the next gradients.
"""

import dataclasses
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from shapes import SIZES, Shapes, count, fill

import paged_optax as po
from helpers.machine import shortage
from helpers.programs import shardings, whole_tree
from paged_optax.cli import machine

SECTION = "update"
RESIDENT, DEFAULT = "optax.adamw, resident", "paged, default"
MEBIBYTE = "paged, pages of 1 MiB"
LEARNING_RATE, DECAY = 1e-3, 0.1

# The most that the ratio to optax.adamw should be on CPU, 8 leaves of 2048x2048, by the
# pages of a leaf. A CPU updates leaves whole, but for pages as small as the last ones.
_TARGETS = {4: 1.5, 16: 1.5, 64: None}
_TARGET_OF_DEFAULT = 1.02


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A transformation, and the most that its ratio should be on CPU."""

    tx: optax.GradientTransformation
    target: float | None = None


def contestants(size: str) -> dict[str, Contestant]:
    """Who runs at a size: forced pages only where leaves are of one page by default."""
    adamw = optax.adamw(LEARNING_RATE, weight_decay=DECAY)
    paged = lambda **how: po.paged_adamw(LEARNING_RATE, weight_decay=DECAY, **how)
    judged = size == "8 x 2048x2048"
    found = {
        RESIDENT: Contestant(adamw),
        "whole-tree offload": Contestant(whole_tree(adamw)),
        DEFAULT: Contestant(paged(), _TARGET_OF_DEFAULT if judged else None),
    }
    if size.startswith("8 x"):
        # The default before pages grew with their leaves.
        found[MEBIBYTE] = Contestant(paged(page_size="1MiB"))
        width = int(size.rpartition("x")[2])
        for pages, target in _TARGETS.items():
            # A GPU's pages may be smaller, see `po.plan`.
            found[f"paged, page_size of a leaf by {pages}"] = Contestant(
                paged(page_size=4 * width**2 // pages),
                target if judged else None,
            )
    return found


@dataclasses.dataclass(frozen=True)
class Update:
    """A compiled update.

    Attributes:
      compiled: Call it with gradients and state, both donated, and parameters.
      state: The state's shapes and placements.
      report: What XLA assigned.
      seconds: Time to trace, lower and compile.
      unused: XLA's words about donated buffers it did not reuse.
    """

    compiled: jax.stages.Compiled
    state: Any
    report: po.MemoryReport
    seconds: float
    unused: list[str]

    @classmethod
    def of(cls, tx: optax.GradientTransformation, shapes: Shapes) -> "Update":
        """Compiles, placements stated, gradients and state donated."""
        place, _ = machine.both_memories()
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
            for name, shape in shapes.items()
        }
        state = po.abstract_state(tx, params)
        # As `jit_step` compiles what has moments on the host.
        options = machine.compiler_options() if po.host_bytes(state) else {}
        jitted = jax.jit(
            tx.update,
            donate_argnums=(0, 1),
            out_shardings=shardings((params, state)),
            compiler_options=options,
        )
        started = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled = jitted.lower(params, state, params).compile()
        return cls(
            compiled,
            state,
            po.memory_report(compiled),
            time.perf_counter() - started,
            [str(x.message)[:200] for x in caught if "donated" in str(x.message)],
        )


def measure(
    size: str, seconds: float, rounds: int, names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Times every contestant that fits.

    Args:
      size: A key of `SIZES`.
      seconds: Start no further round after this time, once there are three.
      rounds: Most rounds.
      names: These contestants alone.

    Returns:
      A row a contestant: seconds, ratio, link rate, XLA's memory; or a reason.
    """
    shapes = SIZES[size]
    field = contestants(size)
    field = {name: field[name] for name in names or field}
    row = lambda name, **figures: {
        "section": SECTION,
        "name": f"{size}: {name}",
        "size": size,
        "contestant": name,
        **figures,
    }
    if reason := shortage(8 * count(shapes), 8 * count(shapes)):
        return [row(name, reason=reason) for name in field]
    rows, running = {}, {}
    for name, contestant in field.items():
        try:
            update = Update.of(contestant.tx, shapes)
        except jax.errors.JaxRuntimeError as error:
            rows[name] = row(name, reason=f"does not compile: {_first_line(error)}")
            continue
        if reason := shortage(update.report.device_total, update.report.host_total):
            rows[name] = row(name, reason=reason)
        else:
            running[name] = update
    if not running:
        return list(rows.values())

    times, failed = _take_turns(running, shapes, seconds, rounds)
    for name, reason in failed.items():
        rows[name] = row(name, reason=reason)
    on_cpu = jax.default_backend() == "cpu"
    base = times.get(RESIDENT)
    for name, turns in times.items():
        update = running[name]
        median = statistics.median(turns)
        ratios = [x / y for x, y in zip(turns, base, strict=True)] if base else []
        ratio = statistics.median(ratios) if ratios else None
        target = field[name].target if on_cpu else None
        moved = 2 * po.host_bytes(update.state)
        rows[name] = row(
            name,
            parameters=count(shapes),
            leaves=len(shapes),
            seconds=median,
            seconds_range=[min(turns), max(turns)],
            ratio=ratio,
            ratio_range=[min(ratios), max(ratios)] if ratios else None,
            ratio_quartiles=_quartiles(ratios),
            rounds=len(turns),
            target=target,
            within_target=None if None in (target, ratio) else ratio <= target,
            host_state_bytes=moved // 2,
            link_gigabytes_per_second=(
                moved / median / 1e9 if moved and not on_cpu else None
            ),
            compile_seconds=update.seconds,
            xla_total_bytes=update.report.device_total,
            xla_scratch_bytes=update.report.device_temp,
            xla_host_scratch_bytes=update.report.host_temp,
            xla_tells_host_from_device=update.report.host_known,
            donated_but_unused=update.unused,
        )
    return [rows[name] for name in field]


def _take_turns(
    running: dict[str, Update],
    shapes: Shapes,
    seconds: float,
    rounds: int,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Median seconds of a turn's steps, a turn each a round; and who dropped out."""
    params = fill(shapes, 0.02)
    start = lambda: (
        fill(shapes, 1e-3),
        po.paged_adamw(LEARNING_RATE).init(params),
    )
    gradients, state = start()
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, update in running.items():  # warms up, and sees who lacks memory
        try:
            state = _move(state, update.state)
            gradients, state = jax.block_until_ready(
                update.compiled(gradients, state, params)
            )
            times[name] = []
        except jax.errors.JaxRuntimeError as error:
            failed[name] = f"failed: {_first_line(error)}"
            gradients = state = None
            gradients, state = start()
    started = time.perf_counter()
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - started > seconds:
            break
        for name in list(times)[:: -1 if turn % 2 else 1]:
            state = _move(state, running[name].state)
            steps = []
            for _ in range(4):  # the first meets its buffers
                before = time.perf_counter()
                gradients, state = jax.block_until_ready(
                    running[name].compiled(gradients, state, params)
                )
                steps.append(time.perf_counter() - before)
            times[name].append(statistics.median(steps[1:]))
    return times, failed


def _move(state: Any, like: Any) -> Any:
    """Puts a state where a contestant keeps it, one leaf at a time; deletes the old."""

    def move(x: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        if x.sharding.is_equivalent_to(wanted.sharding, x.ndim):
            return x
        moved = jax.device_put(x, wanted.sharding).block_until_ready()
        x.delete()
        return moved

    return jax.tree.map(move, state, like)


def _quartiles(values: list[float]) -> list[float] | None:
    enough = len(values) > 1
    return statistics.quantiles(values, method="inclusive")[::2] if enough else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:300]
