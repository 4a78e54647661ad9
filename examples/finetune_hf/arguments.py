"""The command line of `finetune_hf`."""

import argparse
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

#: What `model.stack(on_host=...)` takes, and the row of `what_fits`, by way.
WAYS = {
    "device": (False, "layerwise"),
    "host": (True, "layerwise, weights on host"),
    "all": ("all", "layerwise, all on host"),
}
LENGTH = 2048
TEXT = (
    "a text; or .jsonl, .json, .csv, .parquet or a folder of datasets, of records with"
    " messages (of role and content; what the assistant says is learned), with prompt"
    " and completion, with instruction, input and output, or with text"
)
SMALL = "matrices of fewer bytes a layer stay on the device"
LONG = "a chat longer than a row keeps its first tokens, its last, or is left out"
DECAY = "as in AdamW, of all parameters but norms and biases"
DEVICES = "devices of this machine that divide weights, moments and a step's rows"
WAY = "weights on the device, of layers on the host, or all there; auto: what fits"
MERGE = "write the weights with the adapters added; without --text those of --adapter"
BASE = "of the weights in adapter_config.json (default: --adapter's, or the path)"
#: The highest learning rate, if none is given: of the QLoRA paper for adapters.
RATES = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4}
#: Decay after the warmup, by the names that Hugging Face's trainer has.
SCHEDULES = ("cosine", "linear", "constant_with_warmup", "constant")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Fine-tune the model of a Hugging Face folder, layer by layer."
    )

    def add(name: str, text: str, **how: Any) -> None:
        default = how.get("default")
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(name, help=f"{text}{shown}".replace("%", "%%"), **how)

    path, some, count = pathlib.Path, bounded(int, 1), bounded(int, 0)
    share = bounded(float, 0, below=1)
    positive = bounded(float, 0, strict=True)
    rates = ", ".join(f"{method} {rate:g}" for method, rate in RATES.items())
    dtypes = ["float32", "bfloat16", "float16"]
    add("--checkpoint", "the model's folder", type=path, required=True)
    add("--text", TEXT, type=path)
    add("--eval-text", "records to evaluate on, as --text has them", type=path)
    add("--held-out", "share of rows to evaluate on", type=share, default=0.0)
    add("--output", "the new folder", type=path, required=True)
    add("--resume", "go on with an unfinished run", action="store_true")
    add("--batch", "rows a step, one at a time a device", type=some, default=4)
    add("--devices", DEVICES, type=some, default=1, metavar="N")
    add("--gradient-accumulation", "times --batch", type=some, default=1)
    add("--length", f"tokens a row (default: {LENGTH}, or the model's)", type=some)
    add("--too-long", LONG, default="right", choices=["right", "left", "drop"])
    add("--steps", "steps; 0: as many as --epochs has", type=count, default=0)
    add("--epochs", "times the text is read", type=some, default=1)
    add("--method", "what is trained", default="full", choices=[*RATES])
    add("--rank", "of adapters; --adapter has its own", type=some, default=16)
    add("--alpha", "over rank: adapters' factor", type=positive, default=32.0)
    add("--adapter", "folder of adapters to go on with, by their rank", type=path)
    add("--merge", MERGE, action="store_true")
    add("--base-name", BASE, metavar="NAME")
    add("--learning-rate", f"the highest (default: by method: {rates})", type=positive)
    add("--lr-scheduler-type", "its course", default="cosine", choices=SCHEDULES)
    add("--warmup", "share of steps, 0 to 1", type=share, default=0.03)
    add("--weight-decay", DECAY, type=bounded(float, 0), default=0.0)
    add("--max-norm", "norm to clip all gradients to", type=positive, default=1.0)
    add("--seed", "of the rows' order and of adapters", type=count, default=0)
    add(
        "--dtype", "in training (default: the folder's, which it keeps)", choices=dtypes
    )
    add("--way", WAY, default="auto", choices=["auto", *WAYS])
    add("--device-memory", "such as 24GiB (default: the device's own)", type=size)
    add("--min-size", SMALL, type=size, default="256KiB")
    add("--save-every", "steps between checkpoints", type=some, default=200)
    add(
        "--stop-after",
        "step after which to save and stop; 0: none",
        type=count,
        default=0,
    )
    add("--log-every", "steps between lines, without a terminal", type=some, default=10)
    reports = ["none", "tensorboard", "wandb"]
    add("--report-to", "who gets the losses", default="none", choices=reports)
    args = parser.parse_args(argv)
    if args.eval_text and args.held_out:
        parser.error("--eval-text and --held-out: give one of them")
    if args.text is None and not (args.merge and args.adapter):
        parser.error("--text is missing: only --merge with --adapter needs none")
    if args.method == "full" and (args.merge or args.adapter):
        parser.error("--adapter and --merge need --method lora or qlora")
    return args


def bounded(
    kind: Callable[[str], float],
    least: float,
    *,
    strict: bool = False,
    below: float = math.inf,
) -> Callable[[str], float]:
    """What reads a number from `least` on, or above it, and less than `below`."""

    def number(text: str) -> float:
        read = kind(text)
        if not least <= read < below or (strict and read == least):
            most = f" and below {below:g}" if below < math.inf else ""
            start = "above" if strict else "from"
            raise argparse.ArgumentTypeError(f"{text} is not {start} {least}{most}")
        return read

    return number


def size(text: str) -> str:
    """Checks that a text is a size in bytes."""
    if not re.fullmatch(r"[0-9]+([.][0-9]+)? ?([KMGT]i?B|B)?", text):
        raise argparse.ArgumentTypeError(f"{text} is no size, such as 24GiB")
    return text
