"""What a training run shows: a bar as it goes, and a picture of its losses."""

import contextlib
import csv
import pathlib
from collections.abc import Callable, Iterator

import jax
from rich.progress import BarColumn, Progress, TimeRemainingColumn


@contextlib.contextmanager
def progress(steps: int, start: int) -> Iterator[Callable[[float, float], None]]:
    """A bar with loss, tokens a second and device memory."""
    words = "loss {task.fields[loss]:.4f}, {task.fields[rate]:,.0f} tokens/s"
    columns = "step {task.completed:.0f}/{task.total:.0f}", BarColumn(), words
    fields = {"loss": float("nan"), "rate": 0.0, "memory": ""}
    with Progress(*columns, "{task.fields[memory]}", TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=steps, completed=start, **fields)

        def advance(loss: float, rate: float) -> None:
            peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
            memory = "" if peak is None else f"{peak / 2**30:.1f} GiB"
            bar.update(task, advance=1, loss=loss, rate=rate, memory=memory)

        yield advance


def picture(losses: pathlib.Path, path: pathlib.Path) -> None:
    """Draws the losses."""
    from matplotlib.figure import Figure

    with losses.open() as file:
        found = list(csv.DictReader(file))
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name in ("loss", "held out"):
        points = [(int(x["step"]), float(x[name])) for x in found if x[name]]
        if points:
            axes.plot(*zip(*points, strict=True), label=name)
    axes.set(xlabel="step", ylabel="nats a token")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
