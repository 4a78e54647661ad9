"""Fine-tune a model of a Hugging Face folder on one card, layer by layer.

    pip install ".[hf]"
    python examples/finetune_hf.py --checkpoint Qwen3-4B --text mine.txt --output mine
    python examples/finetune_hf.py --help

All parameters are trained. The moments are in host memory, in eight bits where the
weights are in bfloat16, and with `--way host` or `all` the weights too. What comes out
is a folder like the one that went in, for all that read its format.

Ctrl-C and SIGTERM save what has been done, and say how to go on: `--resume` continues
bit for bit.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from hf_folder import Folder, FolderError, refuse_existing
from hf_model import Model
from hf_shown import picture, progress
from hf_text import Row, batches, documents, rows

import paged_optax as po

PyTree = Any
#: What `model.stack(on_host=...)` takes, and the row of `what_fits`, by way.
WAYS = {
    "device": (False, "layerwise"),
    "host": (True, "layerwise, weights on host"),
    "all": ("all", "layerwise, all on host"),
}
LENGTH = 2048
#: Arguments that may differ when a run goes on: the others decide its numbers.
FREE = ("resume", "save_every", "stop_after", "way", "device_memory", "checkpoint")


# --- Training ------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A training run.

    Attributes:
      args: The command line.
      folder: The folder that is trained.
      model: Its model.
      split: The model's loss, taken apart.
      tx: The optimizer.
      train: Rows to train on.
      held_out: Rows to evaluate on.
      steps: How many steps there are.
    """

    args: argparse.Namespace
    folder: Folder
    model: Model
    split: po.SplitModel
    tx: optax.GradientTransformation
    train: Sequence[Row]
    held_out: Sequence[Row]
    steps: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Run":
        """Reads all that is asked for, but the weights."""
        folder = Folder.open(args.checkpoint)
        longest = folder.config.get("max_position_embeddings", LENGTH)
        args.length = args.length or min(LENGTH, longest)
        if args.length > longest:
            raise FolderError(
                f"--length {args.length} is more than the model's {longest} positions"
                " (max_position_embeddings)."
            )
        dtype = args.dtype or folder.dtype
        model = Model.of(folder.config, dtype)
        found = rows(documents(args.text, tokenizer_of(args.checkpoint)), args.length)
        aside = round(args.held_out * len(found))
        train, held_out = found[: len(found) - aside], found[len(found) - aside :]
        if len(train) == 0:
            raise FolderError(f"{args.text} has no row to train on: give more text.")
        steps = args.steps or -(-args.epochs * len(train) // args.batch)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, args.learning_rate, max(1, round(args.warmup * steps)), steps + 1
        )
        how = {"b2": 0.95, "weight_decay": args.weight_decay}
        if np.dtype(dtype).itemsize == 4:
            tx = po.paged_adamw(schedule, **how)
        else:
            tx = po.paged_adamw_8bit(schedule, master_remainders=True, **how)
        split = po.split_layers(model.loss, model.shapes, train[0])
        return cls(args, folder, model, split, tx, train, held_out, steps)

    @property
    def working(self) -> pathlib.Path:
        """Where the unfinished run is."""
        return self.args.output.with_name(f"{self.args.output.name}.run")

    @functools.cached_property
    def way(self) -> str:
        """Where the weights are: the first way that fits, unless one is asked for."""
        if self.args.way != "auto":
            return self.args.way
        memory = self.args.device_memory or device_memory()
        if memory is None:
            return "device"
        config = self.folder.config
        # Rows go through a layer one by one, and all their inputs are kept.
        row = self.args.length * config["hidden_size"] * self.folder.dtype.itemsize
        kept = (self.args.batch - 1) * config["num_hidden_layers"] * row
        fits = po.what_fits(
            self.split.stack(self.model.shapes),
            device_memory=memory,
            codec="dynamic_int8" if self.folder.dtype.itemsize == 2 else None,
            batch=1,
            length=self.args.length,
            heads=config["num_attention_heads"],
            fused_head=True,
        )
        for way, (_, name) in WAYS.items():
            for found in fits:
                named = found.way.replace(", dynamic_int8", "") == name
                if named and found.device + kept < fits.available:
                    return way
        raise FolderError("no way fits this device: give less --batch or --length.")

    def stacked(self, params: PyTree) -> PyTree:
        """The parameters, or their shapes, where the way has them."""
        where = {"on_host": WAYS[self.way][0], "min_size": self.args.min_size}
        return self.split.stack(params, **where)

    def workspace(self, params: PyTree) -> po.GradientWorkspace:
        return self.split.workspace(params, host_dtype="float32")

    def carry(self) -> tuple[PyTree, ...]:
        """Parameters, moments and workspace, from the folder's weights."""
        params = self.stacked(self.model.read(self.folder))
        params = jax.tree.map(jax.numpy.asarray, params)
        return params, self.tx.init(params), self.workspace(params)

    def step(self, carry: tuple[PyTree, ...]) -> Callable[..., Any]:
        """The compiled step: carry and batch to the next carry and its output."""
        run = po.layerwise_step(
            self.split, self.tx, max_norm=self.args.max_norm, accumulate=True
        )
        batch = next(self.batches())
        return po.jit_step(run, *carry, batch, donate_argnums=(0, 1, 2))

    def batches(self) -> Iterator[Row]:
        return batches(self.train, self.args.batch, self.args.seed)


def train(run: Run) -> None:
    """Trains, from the start or from where the last command stopped."""
    store = Store.of(run)
    print(f"way: {run.way} ({WAYS[run.way][1]})")
    start, carry = store.restored(run) or (0, run.carry())
    store.begin()
    step, asked = run.step(carry), asked_to_stop()
    given = itertools.islice(run.batches(), start, run.steps)
    with store.losses(start) as note, progress(run.steps, start) as shown:
        for number, batch in enumerate(given, start + 1):
            began = time.perf_counter()
            *carry, output = step(*carry, batch)
            loss = float(output.loss)
            rate = batch["tokens"].size / (time.perf_counter() - began)
            held = evaluated(run, carry[0]) if due(run, number) else ""
            note(number, loss, held)
            shown(loss, rate)
            last = asked or number == run.args.stop_after
            if last or number % run.args.save_every == 0 or number == run.steps:
                store.save(number, carry)
            if last:
                again = " ".join([*sys.argv, *["--resume"] * (not run.args.resume)])
                print(f"stopped after step {number}. To go on: python {again}")
                sys.exit(128 + asked[0] if asked else 0)
    store.manager.close()
    values = run.model.tensors(run.folder, run.split, carry[0])
    run.folder.write(run.args.output, values)
    picture(store.path / "losses.csv", run.args.output / "losses.png")
    shutil.rmtree(store.path)
    print(f"wrote {run.args.output}")


def due(run: Run, number: int) -> bool:
    """Whether the held-out loss is computed after this step."""
    every = max(1, run.steps // 10)
    return bool(run.held_out) and (number % every == 0 or number == run.steps)


def evaluated(run: Run, params: PyTree) -> float:
    """The held-out loss: the mean over tokens."""
    loss = jax.jit(run.split.loss)
    weights = [float(row["weights"].sum()) for row in run.held_out]
    losses = [float(loss(params, row)) for row in run.held_out]
    return float(np.average(losses, weights=weights))


# --- Stop and go on --------------------------------------------------------------


def asked_to_stop() -> list[int]:
    """The signals that will have asked to; the step that runs comes to its end."""
    asked = list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    return asked


@dataclasses.dataclass
class Store:
    """An unfinished run's folder: checkpoints, losses, and what decides its numbers."""

    path: pathlib.Path
    decides: dict[str, str]

    @classmethod
    def of(cls, run: Run) -> "Store":
        """What is there.

        Raises:
          FolderError: If there is one of another run, or none to go on with.
        """
        path, decides = run.working.absolute(), vars(run.args)
        refuse_existing(run.args.output)
        decides = {n: str(x) for n, x in decides.items() if n not in FREE}
        decides["text"] = hashlib.sha256(run.args.text.read_bytes()).hexdigest()
        known = path / "run.json"
        if run.args.resume:
            if not known.exists():
                raise FolderError(f"{path} has no run to go on with: leave --resume.")
            before = json.loads(known.read_text())
            for name, value in decides.items():
                if before.get(name) != value:
                    raise FolderError(
                        f"--{name.replace('_', '-')} was {before.get(name)} as the run"
                        f" began, and is {value}: give the same, or another --output."
                    )
        elif path.exists():
            raise FolderError(
                f"{path} has an unfinished run: --resume goes on with it, another"
                " --output begins anew."
            )
        return cls(path, decides)

    @functools.cached_property
    def manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        return ocp.CheckpointManager(self.path / "steps", options=options)

    def begin(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "run.json").write_text(json.dumps(self.decides, indent=2))

    def save(self, number: int, carry: Sequence[PyTree]) -> None:
        self.manager.save(number, args=ocp.args.StandardSave(list(carry)))
        self.manager.wait_until_finished()

    def restored(self, run: Run) -> tuple[int, tuple[PyTree, ...]] | None:
        """The last whole checkpoint: its step, and what was saved; None: none."""
        if not self.path.exists() or (number := self.manager.latest_step()) is None:
            return None
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        placed = lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=getattr(x, "sharding", None) or device
        )
        params = jax.tree.map(placed, run.stacked(run.model.shapes))
        workspace = run.workspace(params)
        target = [
            params,
            po.abstract_state(run.tx, params),
            po.abstract_state(workspace, params),
        ]
        found = self.manager.restore(number, args=ocp.args.StandardRestore(target))
        return number, tuple(found)

    @contextlib.contextmanager
    def losses(self, start: int) -> Iterator[Callable[..., None]]:
        """Notes losses in a file, behind those of the steps before."""
        path = self.path / "losses.csv"
        lines = path.read_text().splitlines()[: start + 1] if start else []
        path.write_text("\n".join([*(lines or ["step,loss,held out"]), ""]))
        with path.open("a", buffering=1) as file:
            yield lambda *values: print(*values, sep=",", file=file)


# --- The command -------------------------------------------------------------------


def tokenizer_of(path: pathlib.Path) -> Any:
    """The folder's tokenizer."""
    from transformers import AutoTokenizer

    # Of a configuration alone transformers makes a tokenizer that knows nothing.
    if not any(path.glob("tokenizer.*")) and not any(path.glob("vocab.*")):
        raise FolderError(f"{path} has no tokenizer: put tokenizer.json beside it.")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        first = str(error).strip().splitlines()[0]
        raise FolderError(
            f"{path} has no tokenizer that can be read: {first}"
        ) from None


def device_memory() -> int | None:
    """Bytes of the device's memory; None: the device does not say, as a CPU."""
    found = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    share = 0.75 if jax.default_backend() == "gpu" else 1.0
    return None if found is None else int(found / share)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Fine-tune the model of a Hugging Face folder, layer by layer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, path = parser.add_argument, pathlib.Path
    add("--checkpoint", type=path, required=True, help="the folder")
    add("--text", type=path, required=True, help="text, or .jsonl of chats or texts")
    add("--output", type=path, required=True, help="the new folder")
    add("--resume", action="store_true", help="go on with an unfinished run")
    add("--batch", type=int, default=4, help="rows a step")
    add("--length", type=int, help=f"tokens a row; {LENGTH}, or what the model has")
    add("--steps", type=int, default=0, help="0: as many as --epochs has")
    add("--epochs", type=int, default=1, help="how often the text is read")
    add("--learning-rate", type=float, default=1e-5, help="the highest")
    add("--warmup", type=float, default=0.03, help="share of the steps")
    add("--weight-decay", type=float, default=0.0, help="as in AdamW")
    add("--max-norm", type=float, default=1.0, help="of all gradients together")
    add("--held-out", type=float, default=0.0, help="share of rows to evaluate on")
    add("--seed", type=int, default=0, help="of the rows' order")
    add("--dtype", help="of the weights in training; the folder keeps its own")
    add("--way", default="auto", choices=["auto", *WAYS], help="where the weights are")
    add("--device-memory", help="such as 24GiB; the device's own if not given")
    add("--min-size", default="256KiB", help="smaller weights stay on the device")
    add("--save-every", type=int, default=200, help="steps between checkpoints")
    add("--stop-after", type=int, default=0, help="save after this step, and stop")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse_arguments(argv)
    try:
        refuse_existing(args.output)
        train(Run.of(args))
    except (FolderError, po.SplitError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
