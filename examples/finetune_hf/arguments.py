"""The command line of `finetune_hf`."""

import argparse
import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

#: For each way, `on_host` of `model.stack` and the way's name in `what_fits`.
WAYS = {
    "device": (False, "layerwise"),
    "host": (True, "layerwise, weights on host"),
    "all": ("all", "layerwise, all on host"),
}
LENGTH = 2048
ROW = f"tokens a row, beside its last label (default: {LENGTH}, or the model's)"
#: Default learning rates; those of adapters are the QLoRA paper's.
RATES = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4}
#: Decay after the warmup, by the names of Hugging Face's trainer.
SCHEDULES = ("cosine", "linear", "constant_with_warmup", "constant")
TEXT = (
    "a text; or .jsonl, .json, .csv, .tsv, .parquet or a folder of datasets, of records"
    " with messages (of role and content; the assistant's are learned), with prompt"
    " and completion, with instruction, input and output, or with text"
)
METHOD = "what is trained (default: full; with --adapter as it was trained, else lora)"
MERGE = "write the weights, QLoRA's in NF4, plus adapters; without --text --adapter's"
BASE = "of the weights in adapter_config.json (default: --adapter's, or the path)"
LONG = "a chat longer than a row keeps its first tokens, its last, or is left out"
DEVICES = "devices of this machine that divide weights, moments and a step's rows"
ASIDE = "share of records to evaluate on, drawn by --seed; of one text, its end"
STOP = "step to save and stop after; once resumed it is not stopped there again"
WAY = "weights on the device, of layers on the host, or all there; auto: what fits"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face folder.")

    def add(name: str, text: str, **how: Any) -> None:
        default = how.get("default")
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(name, help=f"{text}{shown}".replace("%", "%%"), **how)

    sizes = re.compile("[0-9]+([.][0-9]+)? ?([KMGT]i?B|B)?")
    size = allowed(str, "a size, such as 24GiB", sizes.fullmatch)
    path, some = pathlib.Path, allowed(int, "1 or more", lambda x: x > 0)
    count = allowed(int, "0 or more", lambda x: x >= 0)
    amount = allowed(float, "0 or more", lambda x: 0 <= x < math.inf)
    positive = allowed(float, "more than 0", lambda x: 0 < x < math.inf)
    share = allowed(float, "from 0 to less than 1", lambda x: 0 <= x < 1)
    rates = ", ".join(f"{method} {rate:g}" for method, rate in RATES.items())
    types = ["float32", "bfloat16", "float16"]
    add("--checkpoint", "the model's folder", type=path, required=True)
    add("--text", TEXT, type=path)
    add("--eval-text", "records to evaluate on, as --text has them", type=path)
    add("--held-out", ASIDE, type=share, default=0.0)
    add("--output", "the new folder", type=path, required=True)
    add("--resume", "continue an unfinished run", action="store_true")
    add("--batch", "rows a step, one at a time a device", type=some, default=4)
    add("--devices", DEVICES, type=some, default=1, metavar="N")
    add("--gradient-accumulation", "times --batch", type=some, default=1)
    add("--length", ROW, type=some)
    add("--too-long", LONG, default="right", choices=["right", "left", "drop"])
    add("--steps", "steps, instead of --epochs; 0: by --epochs", type=count, default=0)
    add("--epochs", "times the text is read (default: 1)", type=some)
    add("--method", METHOD, choices=[*RATES])
    add("--rank", "of adapters (default: 16, or --adapter's)", type=some)
    add("--alpha", "over rank: adapters' factor (default: 32)", type=positive)
    add("--adapter", "folder of adapters to continue, by their rank", type=path)
    add("--merge", MERGE, action="store_true")
    add("--base-name", BASE, metavar="NAME")
    add("--learning-rate", f"the highest (default: by method: {rates})", type=positive)
    add("--lr-scheduler-type", "its course", default="cosine", choices=SCHEDULES)
    add("--warmup", "share of steps, 0 to 1", type=share, default=0.03)
    decay = "as in AdamW, of all parameters but norms and biases"
    add("--weight-decay", decay, type=amount, default=0.0)
    add("--max-norm", "norm to clip all gradients to", type=positive, default=1.0)
    add("--seed", "of the rows' order and of adapters", type=count, default=0)
    add("--dtype", "in training (default: the folder's, which it keeps)", choices=types)
    add("--way", WAY, default="auto", choices=["auto", *WAYS])
    add("--device-memory", "such as 24GiB (default: the device's own)", type=size)
    small = "matrices of fewer bytes a layer stay on the device"
    add("--min-size", small, type=size, default="256KiB")
    add("--save-every", "steps between checkpoints", type=some, default=200)
    add("--stop-after", f"{STOP}; 0: none", type=count, default=0)
    add("--log-every", "steps between lines, without a terminal", type=some, default=10)
    reports = ["none", "tensorboard", "wandb"]
    add("--report-to", "who gets the losses", default="none", choices=reports)
    args = parser.parse_args(argv)
    if args.eval_text and args.held_out:
        parser.error("--eval-text and --held-out: give one of them")
    if args.text is None and not (args.merge and args.adapter):
        parser.error("--text is missing: only --merge with --adapter needs none")
    if args.method is None and args.adapter:
        known = args.adapter / "run.json"
        settings = json.loads(known.read_text()) if known.exists() else {}
        args.method = "qlora" if settings.get("method") == "qlora" else "lora"
    args.method = args.method or "full"
    if args.method == "full" and (args.merge or args.adapter):
        parser.error("--adapter and --merge need --method lora or qlora")
    if args.steps and args.epochs:
        parser.error("--steps and --epochs: give one of them")
    for name in ("rank", "alpha", "base_name"):
        option, given = f"--{name.replace('_', '-')}", getattr(args, name) is not None
        if given and args.method == "full":
            parser.error(f"{option} needs --method lora or qlora")
        if given and args.adapter and name != "base_name":
            parser.error(f"{option}: --adapter has its own, leave it out")
    args.epochs, args.rank = args.epochs or 1, args.rank or 16
    args.alpha = args.alpha or 32.0
    return args


def allowed(
    kind: Callable[[str], Any], wanted: str, allows: Callable[[Any], object]
) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if allows(value := kind(text)):
            return value
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")

    return number
