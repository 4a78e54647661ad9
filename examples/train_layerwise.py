"""Train a language model with one layer's gradients alive at a time.

The model is the decoder of finetune_lm.py, as it is, and an ordinary loss. It is
trained twice from the same start on the same bytes: by `layerwise_step`, and by the
usual `jax.grad` and `optax.adamw`. Both clip by the exact global norm, and their losses
must agree. A chart shows what each of them takes of the device's memory.

    python examples/train_layerwise.py              # CPU: about a minute
    python examples/train_layerwise.py --weights-on-host --micro-batches 4
    python examples/train_layerwise.py --help

What the layerwise step asks of a training script is in three places, marked:

1. `split_layers` takes the loss apart, and prints what it found;
2. the layers' parameters are stacked by the model that it returns;
3. the workspace, which holds one layer's gradients, is allocated before the loop and
   goes from step to step.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from finetune_lm import (
    Decoder,
    MemoryChart,
    ModelSize,
    argument_bytes,
    batches,
    mean_loss,
    plot_memory,
    positive,
    read_corpus,
)
from flax import nnx
from rich.console import Console
from rich.table import Table

import paged_optax as po

PyTree = Any
MIB = 2**20
MAX_NORM = 1.0


# --- The model -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """A Flax model's structure, and its loss of parameters and a batch."""

    graph: nnx.GraphDef[Decoder]

    @classmethod
    def new(cls, args: argparse.Namespace) -> tuple["Model", PyTree]:
        """The model and its parameters. Equal arguments give equal weights."""
        size = ModelSize(args.hidden, args.layers, heads=args.hidden // 64)
        decoder = Decoder(size, args.length, rngs=nnx.Rngs(args.seed))
        # Only the blocks' inputs are kept for the backward pass, as `layerwise_step`
        # does: what differs is the gradients.
        decoder.remat = True
        graph, params = nnx.split(decoder)
        return cls(graph), params

    def loss(self, params: PyTree, batch: jax.Array) -> jax.Array:
        """The mean loss of the next byte."""
        return mean_loss(nnx.merge(self.graph, params), batch)


# --- The training steps --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step, and what it starts from.

    `step(*carry, batch)` returns the next carry and the loss. The carry is the
    parameters, the optimizer's state and, layer by layer, the workspace.
    """

    step: Callable[..., Any]
    carry: tuple[PyTree, ...]


def ordinary(
    args: argparse.Namespace, model: Model, params: PyTree, batch: np.ndarray
) -> Program:
    """Plain Optax, everything on the device."""
    tx = optax.chain(
        optax.clip_by_global_norm(MAX_NORM),
        optax.adamw(args.learning_rate, weight_decay=0.1),
    )

    def gradients(params: PyTree, batch: jax.Array) -> tuple[jax.Array, PyTree]:
        if args.micro_batches == 1:
            return jax.value_and_grad(model.loss)(params, batch)

        def add(total: PyTree, part: jax.Array) -> tuple[PyTree, None]:
            made = jax.value_and_grad(model.loss)(params, part)
            return jax.tree.map(lambda s, x: s + x / len(batch), total, made), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, batch)[0]

    def step(params: PyTree, state: PyTree, batch: jax.Array) -> tuple[PyTree, ...]:
        loss, grads = gradients(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    carry = params, tx.init(params)
    return Program(po.jit_step(step, *carry, batch, donate_argnums=(0, 1)), carry)


def layerwise(
    args: argparse.Namespace,
    model: Model,
    params: PyTree,
    batch: np.ndarray,
    *,
    on_host: bool = False,
) -> Program:
    """One layer's gradients at a time, the moments on the host."""
    # Clipping is the step's business: `tx` never sees all gradients.
    tx = po.paged_adamw(args.learning_rate, weight_decay=0.1)
    micro_batch = batch[0] if args.micro_batches > 1 else batch
    split = po.split_layers(model.loss, params, micro_batch)  # (1)
    if not on_host:
        print(f"{split}\n")
    params = split.stack(params, on_host=on_host)  # (2)
    one_layer_at_a_time = po.layerwise_step(
        split,
        tx,
        max_norm=MAX_NORM,
        accumulate=args.micro_batches > 1,
    )

    def step(
        params: PyTree, state: PyTree, workspace: PyTree, batch: jax.Array
    ) -> tuple[PyTree, ...]:
        *carry, output = one_layer_at_a_time(params, state, workspace, batch)
        return *carry, output.loss

    workspace = split.workspace(params)  # (3)
    carry = params, split.init(tx, params), workspace
    return Program(po.jit_step(step, *carry, batch, donate_argnums=(0, 1, 2)), carry)


def layerwise_offloaded(
    args: argparse.Namespace, model: Model, params: PyTree, batch: np.ndarray
) -> Program:
    """The same with the weights on the host too, fetched layer by layer."""
    return layerwise(args, model, params, batch, on_host=True)


VARIANTS = {
    "ordinary": ordinary,
    "layerwise": layerwise,
    "layerwise,\nweights on host": layerwise_offloaded,
}


def data(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """The same batches at every call; micro-batches are stacked in front."""
    shape = (args.micro_batches, -1) if args.micro_batches > 1 else (-1,)
    for batch in batches(read_corpus(), args.batch, args.length, args.seed):
        yield batch.reshape(*shape, args.length + 1)


def train(name: str, program: Program, args: argparse.Namespace) -> list[float]:
    """The loss of every step, in nats a byte."""
    carry, losses = program.carry, []
    started = time.perf_counter()
    for batch in itertools.islice(data(args), args.steps):
        *carry, loss = program.step(*carry, batch)
        losses.append(float(loss))
    seconds = (time.perf_counter() - started) / args.steps
    print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {seconds:.2f} s a step")
    return losses


# --- Memory --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a compiled step: three parts on the device, and the host's."""

    parameters: int
    moments: int
    scratch: int  # gradients, activations, what visits from the host
    host: int

    @property
    def device(self) -> int:
        return self.parameters + self.moments + self.scratch

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Memory":
        """Reads XLA's buffer assignment.

        XLA:CPU counts host memory as device memory, so that arguments are told apart
        by their memory kinds.
        """
        parameters, moments, *workspace, _ = argument_bytes(compiled, "device")
        report = po.memory_report(compiled)
        scratch = report.device_total - report.device_arguments
        host = sum(argument_bytes(compiled, "pinned_host")) + report.host_temp
        return cls(parameters, moments, sum(workspace) + scratch, host)


# --- The program ---------------------------------------------------------------


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises `SystemExit` on a value that cannot work."""
    parser = argparse.ArgumentParser(
        description="Train a small language model, one layer's gradients at a time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=positive, default=12, help="training steps of each run")
    add("--layers", type=positive, default=12, help="blocks of the model")
    add("--hidden", type=positive, default=384, help="width, a multiple of 64")
    add("--batch", type=positive, default=8, help="sequences a step")
    add("--length", type=positive, default=64, help="tokens (bytes) a sequence")
    add(
        "--micro-batches",
        type=positive,
        default=1,
        help="parts of a batch, whose gradients are added up",
    )
    add(
        "--weights-on-host",
        action="store_true",
        help="train with the layers' weights in host memory, layer by layer on the"
        " device; the chart shows both in any case",
    )
    add("--learning-rate", type=float, default=1e-3, help="constant")
    add("--seed", type=int, default=0, help="of the weights and of the batches")
    add(
        "--output-dir",
        type=pathlib.Path,
        default=pathlib.Path("out"),
        help="where layerwise_memory.png is written",
    )
    add(
        "--tolerance",
        type=float,
        default=1e-4,
        help="largest difference in loss at which the two runs agree, in nats; a CPU"
        " shows about 1e-6, a GPU more",
    )
    args = parser.parse_args(argv)
    if args.hidden % 64:
        parser.error(f"--hidden {args.hidden} is not a multiple of 64")
    if args.batch % args.micro_batches:
        parser.error(f"--batch {args.batch} is not {args.micro_batches} equal parts")
    return args


def print_tables(losses: dict[str, list[float]], memory: dict[str, Memory]) -> None:
    """Losses at a few steps, and bytes."""
    console = Console()
    table = Table("step", *losses, "difference", title="Loss (nats a byte)")
    usual, ours = losses.values()
    for i in np.unique(np.linspace(0, len(usual) - 1, 6).astype(int)):
        change = f"{ours[i] - usual[i]:+.1e}"
        table.add_row(str(i + 1), f"{usual[i]:.5f}", f"{ours[i]:.5f}", change)
    console.print(table)

    columns = "parameters", "moments", "gradients\nand scratch", "device", "host"
    table = Table("", *columns, title="Memory (MiB)")
    for name, x in memory.items():
        values = x.parameters, x.moments, x.scratch, x.device, x.host
        table.add_row(name, *(f"{value / MIB:,.1f}" for value in values))
    console.print(table)


def main(
    argv: list[str] | None = None,
) -> tuple[dict[str, list[float]], dict[str, Memory]]:
    """Trains, compares, measures, plots. Returns losses and bytes by variant."""
    args = parse_arguments(argv)
    model, params = Model.new(args)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"{count / 1e6:.1f} M parameters, {jax.devices()[0].device_kind},"
        f" jax {jax.__version__}\n"
    )
    usual, *ours = VARIANTS
    trained = usual, ours[args.weights_on_host]
    losses, memory = {}, {}
    for name, build in VARIANTS.items():
        # Steps are given their arguments' memory: each has parameters of its own.
        own = jax.tree.map(jnp.copy, params)
        program = build(args, model, own, next(data(args)))
        memory[name] = Memory.of(program.step.compiled)
        if name in trained:
            losses[name] = train(name.replace("\n", " "), program, args)

    print_tables(losses, memory)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "layerwise_memory.png"
    parts = {
        name: {
            "parameters": x.parameters,
            "moments": x.moments,
            "gradients and scratch": x.scratch,
        }
        for name, x in memory.items()
    }
    host = {name: x.host for name, x in memory.items()}
    plot_memory(MemoryChart("a training step", parts, host), path)
    print(f"Wrote {path}")

    difference = np.abs(np.subtract(*losses.values())).max()
    agree = difference <= args.tolerance
    verdict = (
        f"Largest difference between the losses of the two runs: {difference:.1e}"
        f" nats, {'within' if agree else 'OUTSIDE'} the tolerance of"
        f" {args.tolerance:g}"
    )
    if not agree:
        sys.exit(verdict)
    print(verdict)
    return losses, memory


if __name__ == "__main__":
    main()
