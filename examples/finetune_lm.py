"""Train a language model whose AdamW moments live in host memory.

The model is a decoder-only transformer in Flax NNX. It reads bytes of the Python
standard library's own source files, so nothing is downloaded. It is trained twice
from the same start, with `paged_adamw` and with `optax.adamw`, and the two runs
must show the same losses; with moments in fewer bits, final losses within 1%.

    python examples/finetune_lm.py                      # CPU: about a minute
    python examples/finetune_lm.py --optimizer paged_adamw_8bit
    python examples/finetune_lm.py --size 1b --no-compare   # a GPU or a TPU
    python examples/finetune_lm.py --devices 8     # FSDP, on a CPU that plays eight
    python examples/finetune_lm.py --help

What paging asks of a training script is in two places, marked (1) and (2):

1. `paged_adamw` stands where `optax.adamw` stood;
2. `jit_step` stands where `jax.jit` stood. It states for every array whether it
   lives on the device or on the host, and checks that donated buffers are reused.

With `--devices` parameters, gradients and moments are divided over as many devices
(FSDP), and each pages its own part of the moments. On a TPU slice or a host of several
GPUs the command is the same; every process of a slice runs it.

To fine-tune weights of your own, put them into `params` before `tx.init`.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import math
import pathlib
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from attention import attention
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from rich import progress

import paged_optax as po

PyTree = Any
MIB = 2**20


# --- The model -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Width and depth of a decoder. Parameters: about `12 * layers * width**2`."""

    width: int
    layers: int
    heads: int


SIZES = {
    "mini": ModelSize(width=256, layers=4, heads=4),  # 3 M parameters
    "tiny": ModelSize(width=384, layers=4, heads=6),  # 7 M parameters
    "100m": ModelSize(width=768, layers=14, heads=12),
    "1b": ModelSize(width=2048, layers=20, heads=16),
    "3b": ModelSize(width=3072, layers=28, heads=24),
}
VOCABULARY = 256  # one token a byte


class Block(nnx.Module):
    """Causal self-attention, then a two-layer perceptron, each with a residual."""

    def __init__(self, size: ModelSize, *, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.heads = size.heads
        self.attention_norm = nnx.RMSNorm(size.width, rngs=rngs)
        self.query_key_value = linear(size.width, 3 * size.width)
        self.attention_out = linear(size.width, size.width)
        self.mlp_norm = nnx.RMSNorm(size.width, rngs=rngs)
        self.mlp_up = linear(size.width, 4 * size.width)
        self.mlp_down = linear(4 * size.width, size.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        query, key, value = jnp.split(
            projected.reshape(batch, length, 3 * self.heads, -1), 3, axis=2
        )
        mixed = attention(query, key, value)
        x = x + self.attention_out(mixed.reshape(batch, length, width))
        return x + self.mlp_down(nnx.gelu(self.mlp_up(self.mlp_norm(x))))


def recomputed(block: Block, x: jax.Array) -> jax.Array:
    """`block(x)`, of which the backward pass keeps nothing and computes all again."""
    graphdef, weights = nnx.split(block)
    return jax.checkpoint(lambda weights, x: nnx.merge(graphdef, weights)(x))(
        weights, x
    )


class Decoder(nnx.Module):
    """Tokens `[batch, length]` to logits `[batch, length, VOCABULARY]`.

    The output projection is the transposed token embedding.

    Attributes:
        remat: Whether only the blocks' inputs are kept for the backward pass.
    """

    remat: bool = False

    def __init__(self, size: ModelSize, max_length: int, *, rngs: nnx.Rngs) -> None:
        embed = functools.partial(
            nnx.Embed,
            features=size.width,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.tokens = embed(VOCABULARY)
        self.positions = embed(max_length)
        self.blocks = nnx.List([Block(size, rngs=rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = recomputed(block, x) if self.remat else block(x)
        return self.tokens.attend(self.norm(x))


# --- The text ------------------------------------------------------------------


def read_corpus() -> np.ndarray:
    """The standard library's top-level modules as one array of bytes (4 to 5 MB)."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return np.frombuffer(text, np.uint8)


def batches(
    corpus: np.ndarray, batch: int, length: int, seed: int
) -> Iterator[np.ndarray]:
    """Random windows of `length + 1` tokens; the last is only ever a target."""
    rng = np.random.default_rng(seed)
    window = np.arange(length + 1)
    while True:
        starts = rng.integers(0, len(corpus) - length, size=(batch, 1))
        yield corpus[starts + window].astype(np.int32)


# --- The training step ---------------------------------------------------------

Step = Callable[..., tuple[PyTree, PyTree, jax.Array]]


def mean_loss(model: Decoder, batch: jax.Array) -> jax.Array:
    """Nats a byte, of windows of `length + 1` tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch[:, :-1]), batch[:, 1:]
    ).mean()


def make_step(
    graphdef: nnx.GraphDef[Decoder], tx: optax.GradientTransformation
) -> Step:
    """Plain Optax: nothing in here knows whether the moments are paged.

    What is `frozen` is the rest of the model, where not all of it is trained.
    """

    def step(
        params: PyTree, opt_state: PyTree, batch: jax.Array, *frozen: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        loss, grads = jax.value_and_grad(
            lambda params: mean_loss(nnx.merge(graphdef, params, *frozen), batch)
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def new_model(args: argparse.Namespace) -> Decoder:
    """The decoder that `args` asks for. Equal arguments give equal weights."""
    return Decoder(SIZES[args.size], args.length, rngs=nnx.Rngs(args.seed))


def make_mesh(count: int) -> Mesh:
    """The first devices; what is divided over them is cut along the axis `data`.

    XLA works out how activations are divided (`AxisType.Auto`).
    """
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=devices)


def divided(tree: PyTree, mesh: Mesh, memory_kind: str | None = None) -> PyTree:
    """A sharding for each array: over all devices, along its longest dimension."""
    return jax.tree.map(
        lambda sharding: sharding.with_memory_kind(memory_kind),
        po.fully_sharded(tree, mesh),
    )


def make_optimizers(
    args: argparse.Namespace,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """The same optimizer twice: with paged moments, and as Optax has it."""
    build = getattr(po, args.optimizer)
    stored = {} if args.codec is None else {"codec": args.codec}
    warmup = max(1, args.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=args.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(args.steps, warmup + 1),
        end_value=0.1 * args.learning_rate,
    )
    paged = optax.chain(
        optax.clip_by_global_norm(1.0),
        build(  # (1) here stood optax.adamw: po.paged_adamw, or its 8-bit sister
            schedule,
            weight_decay=0.1,
            page_size=args.page_size,
            device_budget=args.device_budget,
            **stored,
        ),
    )
    plain = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1)
    )
    return paged, plain


def whole_tree_offload(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Offloading as it is usually written: everything in, update, everything out.

    It frees the device between updates and saves nothing while one runs. It is
    here for its bar in the memory chart.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = inner.update(updates, state, params)
        return updates, jax.device_put(state, jax.memory.Space.Host)

    return optax.GradientTransformation(inner.init, update)


def final_loss(losses: Sequence[float]) -> float:
    """The mean of the last ten steps: one batch says little."""
    return float(np.mean(losses[-10:]))


def run(
    label: str,
    step: Step,
    params: PyTree,
    opt_state: PyTree,
    data: Sequence[np.ndarray | jax.Array],
    *frozen: PyTree,
) -> tuple[PyTree, PyTree, list[float]]:
    """Takes a training step a batch, and shows how far it is.

    Returns:
        The parameters, the optimizer's state, and the loss of every step in nats a
        token.
    """
    losses: list[float] = []
    tokens, rate = 0, 0.0
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=10),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[now]}"),
    )
    # On a terminal alone; the line below is for both.
    with progress.Progress(*columns, transient=True) as bar:
        bar.disable = not bar.console.is_terminal
        task = bar.add_task(label, total=len(data), now="the first step")
        started = time.perf_counter()
        for batch in data:
            params, opt_state, loss = step(params, opt_state, batch, *frozen)
            losses.append(float(loss))
            tokens += batch[:, 1:].size
            seconds = time.perf_counter() - started
            rate = tokens / seconds
            left = round(seconds / len(losses) * (len(data) - len(losses)))
            now = f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s"
            now += f", {datetime.timedelta(seconds=left)} left"
            bar.update(task, advance=1, now=now)
    print(
        f"{label}: loss {losses[0]:.3f} -> {final_loss(losses):.3f}"
        f" (mean of the last 10 steps), {rate:,.0f} tokens/s"
    )
    return params, opt_state, losses


def train(
    label: str,
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    corpus: np.ndarray,
) -> tuple[list[float], jax.stages.Compiled]:
    """Trains from the same start, on the same batches, whatever `tx` is.

    Returns:
        The loss of every step in nats a token, and the compiled step.
    """
    mesh = make_mesh(args.devices)
    graphdef, params = nnx.split(new_model(args))
    params = jax.device_put(params, divided(params, mesh))
    opt_state = tx.init(params)
    by_sequence = NamedSharding(mesh, PartitionSpec("data"))
    data = (
        jax.device_put(batch, by_sequence)
        for batch in batches(corpus, args.batch, args.length, args.seed)
    )

    started = time.perf_counter()
    step = po.jit_step(  # (2) here stood jax.jit
        make_step(graphdef, tx), params, opt_state, next(data), donate_argnums=(0, 1)
    )
    print(f"{label}: compiled in {time.perf_counter() - started:.1f} s")

    steps = list(itertools.islice(data, args.steps))
    _, _, losses = run(label, step, params, opt_state, steps)
    return losses, step.compiled


# --- Device memory -------------------------------------------------------------

VARIANTS: tuple[str, ...] = ("resident", "whole-tree offload", "paged")


def place(tree: PyTree, memory_kind: str, mesh: Mesh | None = None) -> PyTree:
    """The shapes of `tree`, said to live in `memory_kind`. Allocates nothing."""
    mesh = mesh or make_mesh(1)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        divided(tree, mesh, memory_kind),
    )


def compile_only(
    args: argparse.Namespace, tx: optax.GradientTransformation, memory_kind: str
) -> jax.stages.Compiled:
    """The training step with its whole state in `memory_kind`, never run."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: new_model(args)))
    opt_state = jax.eval_shape(tx.init, params)
    mesh = make_mesh(args.devices)
    batch = jax.ShapeDtypeStruct(
        (args.batch, args.length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec("data"), memory_kind="device"),
    )
    return po.jit_step(
        make_step(graphdef, tx),
        place(params, "device", mesh),
        place(opt_state, memory_kind, mesh),
        batch,
        donate_argnums=(0, 1),
    ).compiled


def argument_bytes(compiled: jax.stages.Compiled, memory_kind: str) -> list[int]:
    """Bytes on one device of each of the step's arguments in `memory_kind`.

    XLA packs values narrower than a byte: of four bits, two into one.
    """
    return [
        sum(
            math.prod(sharding.shard_shape(x.shape))
            * jax.dtypes.itemsize_bits(x.dtype)
            // 8
            for x, sharding in zip(
                jax.tree.leaves(argument), jax.tree.leaves(shardings), strict=True
            )
            if sharding.memory_kind == memory_kind
        )
        for argument, shardings in zip(
            compiled.args_info[0], compiled.input_shardings[0], strict=True
        )
    ]


@dataclasses.dataclass(frozen=True)
class MemoryChart:
    """Device bytes of each variant, in named parts, and where they come from."""

    source: str
    device: dict[str, dict[str, int]]  # variant -> part -> bytes
    host: dict[str, int]  # variant -> bytes


def reported_memory(compiled: dict[str, jax.stages.Compiled]) -> MemoryChart:
    """What XLA's buffer assignment says of the whole training step."""
    reports = {name: po.memory_report(step) for name, step in compiled.items()}
    return MemoryChart(
        "the whole training step, reported by XLA",
        {
            name: {
                "arguments: parameters, moments that stay": report.device_arguments,
                "scratch: gradients, activations, moments in transit": (
                    report.device_total - report.device_arguments
                ),
            }
            for name, report in reports.items()
        },
        {name: report.host_arguments for name, report in reports.items()},
    )


def computed_memory(
    compiled: dict[str, jax.stages.Compiled], visiting: dict[str, int]
) -> MemoryChart:
    """What must be on the device while the optimizer updates.

    For the CPU backend, whose device and host are one memory: XLA reports no host
    bytes there, and leaves out the copies from one to the other.

    Args:
        compiled: The training step of each variant.
        visiting: Bytes of moments that each variant fetches from the host at a time.
    """
    return MemoryChart(
        "the optimizer update, computed from sizes and memory kinds\n"
        "(XLA:CPU does not tell host from device; activations not counted)",
        {
            name: {
                "parameters": argument_bytes(step, "device")[0],
                "gradients": argument_bytes(step, "device")[0],
                "moments that stay": argument_bytes(step, "device")[1],
                "moments in transit": visiting[name],
            }
            for name, step in compiled.items()
        },
        {
            name: sum(argument_bytes(step, "pinned_host"))
            for name, step in compiled.items()
        },
    )


# --- Plots ---------------------------------------------------------------------


def plot_losses(losses: dict[str, list[float]], path: pathlib.Path) -> None:
    """The runs on top of each other: a wide pale line, a thin dashed one."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    styles = (
        {"color": "black", "linewidth": 1.2, "linestyle": "--", "zorder": 3},
        {"color": "tab:orange", "linewidth": 5.0, "alpha": 0.5},
    )
    for (label, values), style in zip(losses.items(), styles, strict=False):
        axes.plot(range(1, len(values) + 1), values, label=label, **style)
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (nats a byte)")
    axes.set_title("Training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_memory(chart: MemoryChart, path: pathlib.Path) -> None:
    """One stacked bar a variant, its total above it, its host bytes below."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    names = list(chart.device)
    parts = list(chart.device[names[0]])
    bottom = np.zeros(len(names))
    fills = (("0.4", ""), ("0.8", "///"), ("tab:blue", "..."), ("tab:orange", "xx"))
    for part, (color, hatch) in zip(parts, fills, strict=False):
        height = np.array([chart.device[name][part] / MIB for name in names])
        axes.bar(
            names,
            height,
            width=0.6,
            bottom=bottom,
            label=part,
            color=color,
            hatch=hatch,
            edgecolor="black",
        )
        bottom += height
    for index, total in enumerate(bottom):
        axes.text(index, total, f"{total:,.1f}", ha="center", va="bottom")
    axes.set_xticks(
        range(len(names)),
        [f"{name}\n(host: {chart.host[name] / MIB:,.1f} MiB)" for name in names],
    )
    axes.set_ylabel("device memory (MiB)")
    axes.set_ylim(0, 1.45 * bottom.max())  # room for the legend
    axes.set_title(f"Device memory of {chart.source}", fontsize="medium")
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=150)


# --- The program ---------------------------------------------------------------


def positive(text: str) -> int:
    """The value of a flag that counts something."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises `SystemExit` on a value that cannot work."""

    def budget(text: str) -> int | str | None:
        return None if text == "none" else int(text) if text.isdigit() else text

    parser = argparse.ArgumentParser(
        description="Train a small language model with AdamW moments in host memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="parameters of the model")
    add(
        "--optimizer",
        choices=("paged_adamw", "paged_adamw_8bit"),
        default="paged_adamw",
        help="what trains beside optax.adamw",
    )
    add(
        "--codec",
        help="how moments are stored, such as dynamic_int4 or bfloat16_stochastic;"
        " the optimizer's own where not given",
    )
    add("--steps", type=positive, default=60, help="training steps of each run")
    add("--batch", type=positive, default=8, help="sequences a step")
    add(
        "--devices",
        type=positive,
        default=1,
        help="divide parameters, moments and batches over this many devices; a machine"
        " without accelerators plays them",
    )
    add("--length", type=positive, default=64, help="tokens (bytes) a sequence")
    add("--learning-rate", type=float, default=1e-3, help="peak of the schedule")
    add(
        "--page-size",
        default="1MiB",
        help="one page of one moment; auto suits models of 100 M parameters and more",
    )
    add(
        "--device-budget",
        type=budget,
        default=0,
        help="moments that may stay on the device: bytes, 64MiB, or none (all)",
    )
    add("--seed", type=int, default=0, help="of the weights and of the batches")
    add(
        "--output-dir",
        type=pathlib.Path,
        default=pathlib.Path("out"),
        help="where loss.png and memory.png are written",
    )
    add(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train with plain optax.adamw too and compare the losses",
    )
    add(
        "--tolerance",
        type=float,
        default=0.01,
        help="at which difference the two runs agree: the largest of any step, in nats"
        " (a CPU shows about 1e-6, a GPU more, as it adds in another order in every"
        " run); with moments in fewer bits, that of the final loss, as a share of it",
    )
    args = parser.parse_args(argv)
    if args.batch % args.devices:
        parser.error(
            f"--batch {args.batch} does not divide over {args.devices} devices"
        )
    return args


def compare(
    paged: Sequence[float], plain: Sequence[float], coded: bool
) -> tuple[float, str]:
    """How far the losses of the two runs are apart, and in what words.

    Moments in float32 give every loss again; in fewer bits they give others, and what
    counts is where they lead.
    """
    if coded:
        difference = abs(final_loss(paged) / final_loss(plain) - 1)
        return difference, "Final losses differ, as a share of them, by"
    difference = np.abs(np.subtract(paged, plain)).max()
    return float(difference), "Losses differ by at most, in nats,"


def what_next(label: str, agree: bool) -> str:
    """What to try after a run."""
    if not agree:
        return "python -m paged_optax doctor tests paging on this machine."
    if label == "paged_adamw":
        return (
            "--optimizer paged_adamw_8bit keeps a quarter of these bytes on the host."
        )
    return "python -m paged_optax plan --help says what fits on a device of yours."


def main() -> int:
    """Trains, compares, measures, plots. Returns the exit status."""
    args = parse_arguments()
    jax.config.update("jax_num_cpu_devices", args.devices)
    if args.devices > jax.device_count():
        sys.exit(
            f"finetune_lm.py: error: --devices {args.devices}, and JAX sees"
            f" {jax.device_count()}"
        )
    try:
        paged, plain = make_optimizers(args)
    except ValueError as error:  # such as a page size that cannot be read
        sys.exit(f"finetune_lm.py: error: {error}")
    corpus = read_corpus()
    shapes = nnx.state(nnx.eval_shape(lambda: new_model(args)))
    parameters = sum(x.size for x in jax.tree.leaves(shapes))
    print(
        f"{parameters / 1e6:.1f} M parameters, {len(corpus) / 1e6:.1f} MB of text,"
        f" {args.devices} x {jax.devices()[0].device_kind}, jax {jax.__version__}\n"
    )
    mesh = make_mesh(args.devices)
    plan = po.plan(paged, shapes, mesh=mesh, devices_per_host=jax.local_device_count())
    print(plan, end="\n\n")

    losses: dict[str, list[float]] = {}
    steps: dict[str, jax.stages.Compiled] = {}
    label = " ".join(filter(None, (args.optimizer, args.codec)))
    losses[label], steps["paged"] = train(label, args, paged, corpus)
    if args.compare:
        losses["optax.adamw"], steps["resident"] = train(
            "optax.adamw", args, plain, corpus
        )
    report = po.memory_report(steps["paged"])
    print(f"\nMemory of the paged step, as compiled:\n\n{report}\n")

    for name, tx, memory_kind in (
        ("resident", plain, "device"),
        ("whole-tree offload", whole_tree_offload(plain), "pinned_host"),
    ):
        if name not in steps:
            try:
                steps[name] = compile_only(args, tx, memory_kind)
            except jax.errors.JaxRuntimeError as error:  # a TPU's compiler says so
                print(f"{name}: does not fit: {str(error).splitlines()[0]}")
    steps = {name: steps[name] for name in VARIANTS if name in steps}
    if report.host_known:
        chart = reported_memory(steps)
    else:
        offloaded = argument_bytes(steps["whole-tree offload"], "pinned_host")[1]
        visiting = dict(zip(VARIANTS, (0, offloaded, plan.scratch_bytes), strict=True))
        chart = computed_memory(steps, visiting)

    args.output_dir.mkdir(parents=True, exist_ok=True)
    plot_losses(losses, args.output_dir / "loss.png")
    plot_memory(chart, args.output_dir / "memory.png")
    print(f"Wrote {args.output_dir / 'loss.png'} and {args.output_dir / 'memory.png'}")

    agree = True
    if args.compare:
        difference, what = compare(*losses.values(), coded=label != "paged_adamw")
        agree = difference <= args.tolerance
        print(
            f"{what} {difference:.1e}, {'within' if agree else 'OUTSIDE'} the"
            f" tolerance of {args.tolerance:g}"
        )
    print(f"\nNext: {what_next(label, agree)}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
