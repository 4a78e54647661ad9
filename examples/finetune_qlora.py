"""Adapt a language model: weights in NF4, adapters trained with `paged_adamw_8bit`.

The decoder of finetune_lm.py is first trained in full on the Python standard library's
source files. Then Qwix stores its matrices in four bits (NF4) and gives each a LoRA
adapter, and the adapters alone are trained on other text that comes with every Python:
its reference manual, as `help()` shows it. The loss on a part of the manual that was
not trained on is measured before and after, and a chart shows where the bytes go in
full fine-tuning, LoRA, QLoRA, and QLoRA with paged 8-bit moments.

    python examples/finetune_qlora.py                   # CPU: one to two minutes
    python examples/finetune_qlora.py --resume --steps 160
    python examples/finetune_qlora.py --help

What QLoRA asks of a training script is in three places, marked:

1. Qwix turns the model into one with NF4 weights and adapters;
2. `nnx.split` tells the adapters, which are trained, from all that is frozen;
3. the optimizer sees the adapters only, and its state is restored into host memory
   by `po.abstract_state`.
"""

import argparse
import dataclasses
import itertools
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
from finetune_lm import (
    SIZES,
    Decoder,
    MemoryChart,
    Step,
    argument_bytes,
    batches,
    make_step,
    mean_loss,
    new_model,
    place,
    plot_memory,
    positive,
    read_corpus,
    run,
)
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

import paged_optax as po

PyTree = Any
MIB = 2**20
NF4_BLOCK = 64  # weights that share a scale, as in the QLoRA paper


# --- The text ------------------------------------------------------------------


def read_manual() -> tuple[np.ndarray, np.ndarray]:
    """Python's reference manual, 0.5 MB; every tenth page is kept for testing."""
    pages = [topics[name].encode() for name in sorted(topics)]
    parts = [page for i, page in enumerate(pages) if i % 10], pages[::10]
    train, test = (np.frombuffer(b"\n\n".join(part), np.uint8) for part in parts)
    return train, test


# --- The models ----------------------------------------------------------------


def with_adapters(
    model: Decoder, args: argparse.Namespace, weight_qtype: str | None = None
) -> Decoder:
    """(1) The model with an adapter beside every matrix of its blocks.

    Args:
        model: The model, in float32. It is left as it is.
        args: The command line.
        weight_qtype: What the matrices are stored in: `"nf4"`, or None for float32.
    """
    stored = {"weight_qtype": weight_qtype, "tile_size": NF4_BLOCK}
    provider = qwix.LoraProvider(
        module_path="blocks/.*",
        rank=args.rank,
        alpha=2 * args.rank,
        **(stored if weight_qtype else {}),
    )
    # Qwix finds the matrices by running the model once, on a token.
    token = jnp.zeros((1, 1), jnp.int32)
    apply = lambda model, rngs: qwix.apply_lora_to_model(
        model, provider, token, rngs=rngs
    )
    return nnx.jit(apply)(model, nnx.Rngs(args.seed))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to adapt a model: which one, which of its weights, by which optimizer."""

    model: Callable[[], Decoder]
    trained: type[nnx.Variable]
    tx: optax.GradientTransformation
    paged: bool = False


def variants(args: argparse.Namespace) -> dict[str, Variant]:
    """What the chart compares; the last is what is trained."""
    lora = lambda qtype: lambda: with_adapters(new_model(args), args, qtype)
    plain = optax.adamw(args.learning_rate)
    paged = po.paged_adamw_8bit(
        args.learning_rate,
        # Like moments of 32 KiB or more, as stored, page by default; here are smaller.
        min_paged_size=0,
    )
    return {
        "full fine-tuning": Variant(lambda: new_model(args), nnx.Param, plain),
        "LoRA": Variant(lora(None), nnx.LoRAParam, plain),
        "QLoRA": Variant(lora("nf4"), nnx.LoRAParam, plain),
        "QLoRA,\npaged 8-bit": Variant(lora("nf4"), nnx.LoRAParam, paged, paged=True),
    }


# --- Training ------------------------------------------------------------------


def train_base(args: argparse.Namespace) -> PyTree:
    """All weights, on the standard library's source files."""
    graphdef, params = nnx.split(new_model(args))
    tx = po.paged_adamw(args.base_learning_rate, weight_decay=0.1)
    state = tx.init(params)
    data = batches(read_corpus(), args.batch, args.length, args.seed)
    data = list(itertools.islice(data, args.base_steps))
    step = po.jit_step(
        make_step(graphdef, tx), params, state, data[0], donate_argnums=(0, 1)
    )
    return run("base model", step, params, state, data)[0]


def compile_step(variant: Variant, args: argparse.Namespace) -> po.Step:
    """The training step of a variant, compiled from shapes: nothing is allocated."""
    model = nnx.eval_shape(variant.model)
    model.remat = True  # of the activations, which all ways share, little is kept
    # (2) What is trained is the step's first argument, what is frozen its last.
    graphdef, trained, frozen = nnx.split(model, variant.trained, ...)
    trained, frozen = place((trained, frozen), "device")
    batch = jax.ShapeDtypeStruct((args.batch, args.length + 1), jnp.int32)
    return po.jit_step(
        make_step(graphdef, variant.tx),
        trained,
        po.abstract_state(variant.tx, trained),
        place(batch, "device"),
        frozen,
        donate_argnums=(0, 1),
    )


def check_paged(tx: optax.GradientTransformation, adapters: PyTree) -> None:
    """Codecs store leaves under 4096 values in float32: here there must be none."""
    for moment in po.plan(tx, adapters).moments:
        if moment.shape and not (moment.on_host and "Int8" in moment.dtype):
            sys.exit(
                f"finetune_qlora.py: error: {moment.path}, {moment.shape}, is not paged"
                " in eight bits: take a larger --rank or --size"
            )


def evaluate(model: Decoder, text: np.ndarray, args: argparse.Namespace) -> float:
    """The mean loss over 64 windows spread evenly over `text`, in nats a byte."""
    graphdef, state = nnx.split(model)
    starts = np.linspace(0, len(text) - args.length - 1, 64).astype(int)
    windows = text[starts[:, None] + np.arange(args.length + 1)].astype(np.int32)
    loss = jax.jit(lambda state: mean_loss(nnx.merge(graphdef, state), windows))
    return float(loss(state))


# --- Checkpoints ---------------------------------------------------------------


def base_weights(args: argparse.Namespace, folder: pathlib.Path) -> PyTree:
    """The base model's weights: read where a run is resumed, else trained, and kept."""
    with ocp.StandardCheckpointer() as checkpointer:
        if args.resume:
            shapes = nnx.state(nnx.eval_shape(lambda: new_model(args)))
            return checkpointer.restore(folder / "base", place(shapes, "device"))
        shutil.rmtree(folder, ignore_errors=True)
        weights = train_base(args)
        checkpointer.save(folder / "base", weights)
        return weights


def adapt(
    args: argparse.Namespace,
    folder: pathlib.Path,
    step: Step,
    tx: optax.GradientTransformation,
    adapters: PyTree,
    frozen: PyTree,
) -> tuple[PyTree, PyTree]:
    """Trains the adapters on the manual, from the last checkpoint if there is one.

    Returns:
        The adapters and the optimizer's state, of which the moments are on the host.
    """
    text, _ = read_manual()
    data = batches(text, args.batch, args.length, args.seed)
    data = list(itertools.islice(data, args.steps))
    with ocp.CheckpointManager(folder / "adapters") as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            # (3) Shapes that say where each array belongs: moments on the host.
            state = po.abstract_state(tx, adapters)
            target = {"adapters": place(adapters, "device"), "state": state}
            restore = ocp.args.StandardRestore(target)
            restored = checkpoints.restore(done, args=restore)
            adapters, state = restored["adapters"], restored["state"]
            print(f"Resumed after step {done}")
        else:
            state = tx.init(adapters)
        while done < args.steps:
            part = data[done : done + args.save_every]
            adapters, state, _ = run("adapters", step, adapters, state, part, frozen)
            done += len(part)
            saved = {"adapters": adapters, "state": state}
            checkpoints.save(done, args=ocp.args.StandardSave(saved))
            checkpoints.wait_until_finished()  # the next step overwrites the arrays
    return adapters, state


# --- Memory --------------------------------------------------------------------


PARTS = ("frozen weights", "trained weights", "their gradients", "moments, or pages")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a training step, counted from the arguments of the compiled program.

    Attributes:
        frozen: Weights that are not trained.
        trained: Weights that are; their gradients are as many bytes.
        moments: Moments on the device, those that visit it page by page among them.
        host: Moments on the host.
        scratch: What XLA assigns beside the arguments: gradients, activations, pages,
            decoded weights. None on a CPU, whose device and host are one memory.
    """

    frozen: int
    trained: int
    moments: int
    host: int
    scratch: int | None

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, visiting: int) -> "Memory":
        trained, moments, _, frozen = argument_bytes(compiled, "device")
        host = sum(argument_bytes(compiled, "pinned_host"))
        report = po.memory_report(compiled)
        scratch = report.device_total - report.device_arguments
        known = scratch if report.host_known else None
        return cls(frozen, trained, moments + visiting, host, known)

    @property
    def parts(self) -> dict[str, int]:
        """What the chart stacks: all that is on the device beside activations."""
        sizes = self.frozen, self.trained, self.trained, self.moments
        return dict(zip(PARTS, sizes, strict=True))

    @property
    def device(self) -> int:
        return sum(self.parts.values())


def measure(variant: Variant, step: po.Step) -> Memory:
    """The bytes of a compiled variant, the plan's pages in flight among them."""
    trained = nnx.state(nnx.eval_shape(variant.model), variant.trained)
    visiting = po.plan(variant.tx, trained).scratch_bytes if variant.paged else 0
    return Memory.of(step.compiled, visiting)


def print_tables(losses: dict[str, float], memory: dict[str, Memory]) -> None:
    """With lines on a terminal, in plain columns elsewhere."""
    console = Console()

    def show(title: str, columns: Iterable[str], rows: dict[str, list[str]]) -> None:
        table = Table(title, box=box.ROUNDED if console.is_terminal else None)
        for column in columns:
            table.add_column(column, justify="right")
        for name, cells in rows.items():
            table.add_row(name, *cells)
        console.print(table, "")

    rows = {name: [f"{loss:.3f}"] for name, loss in losses.items()}
    show("Loss on text not trained on", ["nats a byte"], rows)

    sizes = {part: [x.parts[part] for x in memory.values()] for part in PARTS}
    sizes["on the device"] = [x.device for x in memory.values()]
    sizes["on the host"] = [x.host for x in memory.values()]
    sizes["scratch, by XLA"] = [x.scratch for x in memory.values()]
    rows = {
        name: ["-" if size is None else f"{size / MIB:,.2f}" for size in row]
        for name, row in sizes.items()
    }
    show("Memory (MiB)", (name.replace("\n", " ") for name in memory), rows)


# --- The program ---------------------------------------------------------------


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises `SystemExit` on a value that cannot work."""
    parser = argparse.ArgumentParser(
        description="Adapt a small language model with QLoRA, moments in host memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="mini", help="parameters of the model")
    add("--base-steps", type=positive, default=120, help="steps of the base model")
    add("--steps", type=positive, default=80, help="steps of the adapters, in all")
    add("--save-every", type=positive, default=40, help="steps from save to save")
    add(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint under --output-dir; a new run replaces it",
    )
    add(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the other ways of training too, for the table and the chart",
    )
    add("--rank", type=positive, default=16, help="of the adapters")
    add("--batch", type=positive, default=8, help="sequences a step")
    add("--length", type=positive, default=64, help="tokens (bytes) a sequence")
    add("--base-learning-rate", type=float, default=1e-3, help="constant")
    add("--learning-rate", type=float, default=3e-3, help="of the adapters, constant")
    add("--seed", type=int, default=0, help="of the weights and of the batches")
    add(
        "--output-dir",
        type=pathlib.Path,
        default=pathlib.Path("out"),
        help="where qlora_memory.png and the checkpoints (qlora/) are written",
    )
    args = parser.parse_args(argv)
    folder = args.output_dir / "qlora"
    if args.resume and not (folder / "adapters").is_dir():
        parser.error(f"--resume: no checkpoint under {folder}")
    return args


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out: losses and bytes by name, adapters and their state, the step."""

    losses: dict[str, float]
    memory: dict[str, Memory]
    adapters: PyTree
    state: PyTree
    step: po.Step


def main(argv: list[str] | None = None) -> Result:
    """Trains the base, adapts it, measures, plots, saves."""
    args = parse_arguments(argv)
    folder = (args.output_dir / "qlora").resolve()
    ways = variants(args)
    *_, (name, qlora) = ways.items()
    if not args.compare:
        ways = {name: qlora}
    check_paged(qlora.tx, nnx.state(nnx.eval_shape(qlora.model), qlora.trained))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")

    base = new_model(args)
    # Copies that JAX may move: a compiled step of jax 0.10.2 refuses four-bit weights
    # made of arrays that are committed to a CPU.
    weights = jax.tree.map(jnp.asarray, jax.device_get(base_weights(args, folder)))
    nnx.update(base, weights)
    model = with_adapters(base, args, "nf4")
    _, held_out = read_manual()
    losses = {
        "base model in float32": evaluate(base, held_out, args),
        "base model in NF4": evaluate(model, held_out, args),
    }
    del base

    steps = {name: compile_step(variant, args) for name, variant in ways.items()}
    *_, step = steps.values()
    _, adapters, frozen = nnx.split(model, qlora.trained, ...)
    adapters, state = adapt(args, folder, step, qlora.tx, adapters, frozen)
    nnx.update(model, adapters)
    losses["NF4 and adapters"] = evaluate(model, held_out, args)

    memory = {name: measure(variant, steps[name]) for name, variant in ways.items()}
    print_tables(losses, memory)
    path = args.output_dir / "qlora_memory.png"
    chart = MemoryChart(
        "training: weights, gradients, moments",
        {name: x.parts for name, x in memory.items()},
        {name: x.host for name, x in memory.items()},
    )
    plot_memory(chart, path)
    print(f"Wrote {path}, and under {folder} what --resume goes on from")
    return Result(losses, memory, adapters, state, step)


if __name__ == "__main__":
    main()
