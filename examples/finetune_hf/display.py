"""Progress, and reports of the losses."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from .folder import FolderError

#: Takes a step's number, loss, tokens a second, and held-out loss or "".
Show = Callable[[int, float, float, float | str], None]


@contextlib.contextmanager
def progress(steps: int, start: int, every: int) -> Iterator[Show]:
    """Shows steps in a bar; without a terminal in lines, one in `every` steps."""
    console = Console()
    columns = "step {task.completed:.0f}/{task.total:.0f}", BarColumn()
    columns += "{task.fields[words]}", TimeRemainingColumn()
    bar = Progress(*columns, console=console)

    def show(number: int, loss: float, rate: float, held: float | str) -> None:
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        memory = "" if peak is None else f", {peak / 2**30:.1f} GiB"
        text = f"loss {loss:.4f}, {rate:,.0f} tokens/s{memory}"
        if console.is_terminal:
            bar.update(task, advance=1, words=text)
        elif number % every == 0 or number in (start + 1, steps):
            print(f"step {number}/{steps}: {text}", flush=True)
        if held != "":
            bar.console.print(f"step {number}: held-out loss {held:.4f}")

    with bar if console.is_terminal else contextlib.nullcontext():
        task = bar.add_task("", total=steps, completed=start, words="")
        yield show


def reporter(kind: str, arguments: Mapping[str, Any]) -> Callable[..., None]:
    """Returns what reports a step's numbers to TensorBoard or Weights & Biases."""
    if kind == "none":
        return lambda number, values: None
    package = {"tensorboard": "tensorboardX"}.get(kind, kind)
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise FolderError(f"--report-to {kind} needs pip install {package}.") from None
    if kind == "tensorboard":
        write = module.SummaryWriter(f"{arguments['output']}.tensorboard").add_scalar
        return lambda number, values: [write(*x, number) for x in values.items()]
    settings = {name: str(x) for name, x in arguments.items()}
    run = module.init(project="finetune_hf", config=settings)
    return lambda number, values: run.log(values, step=number)
