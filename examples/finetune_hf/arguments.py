"""The command line of `finetune_hf`."""

import argparse
import math
import pathlib
import re
from collections.abc import Callable, Sequence

#: What `model.stack(on_host=...)` takes, and the row of `what_fits`, by way.
WAYS = {
    "device": (False, "layerwise"),
    "host": (True, "layerwise, weights on host"),
    "all": ("all", "layerwise, all on host"),
}
LENGTH = 2048
TEXT = (
    'text; or .jsonl, of lines {"messages": [{"role": "user", "content": "..."}, ...]},'
    ' of which what the assistant says is learned, or {"text": "..."}'
)
SMALL = "matrices of fewer bytes a layer stay on the device"
LONG = "a chat longer than a row keeps its first tokens, its last, or is left out"
DECAY = "as in AdamW, of all parameters but norms and biases"
#: The highest learning rate, if none is given: of the QLoRA paper for adapters.
RATES = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4}
#: Decay after the warmup, by the names that Hugging Face's trainer has.
SCHEDULES = ("cosine", "linear", "constant_with_warmup", "constant")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Fine-tune the model of a Hugging Face folder, layer by layer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, path = parser.add_argument, pathlib.Path
    some, count, share = above(0, int), at_least(0, int), at_least(0, float, below=1)
    positive, dtypes = above(0, float), ["float32", "bfloat16", "float16"]
    rates = ", ".join(f"{method} {rate:g}" for method, rate in RATES.items())
    add("--checkpoint", type=path, required=True, help="the folder")
    add("--text", type=path, required=True, help=TEXT)
    add("--output", type=path, required=True, help="the new folder")
    add("--resume", action="store_true", help="go on with an unfinished run")
    add("--batch", type=some, default=4, help="rows a step, computed one at a time")
    add("--gradient-accumulation", type=some, default=1, help="times --batch")
    add("--length", type=some, help=f"tokens a row; {LENGTH}, or what the model has")
    add("--too-long", default="right", choices=["right", "left", "drop"], help=LONG)
    add("--steps", type=count, default=0, help="0: as many as --epochs has")
    add("--epochs", type=some, default=1, help="how often the text is read")
    add("--method", default="full", choices=[*RATES], help="what is trained")
    add("--rank", type=some, default=16, help="of adapters")
    add("--alpha", type=positive, default=32.0, help="alpha / rank scales adapters")
    add("--learning-rate", type=positive, help=f"the highest, by method: {rates}")
    add("--lr-scheduler-type", default="cosine", choices=SCHEDULES, help="decay")
    add("--warmup", type=share, default=0.03, help="share of the steps")
    add("--weight-decay", type=at_least(0, float), default=0.0, help=DECAY)
    add("--max-norm", type=positive, default=1.0, help="of all gradients together")
    add("--held-out", type=share, default=0.0, help="share of rows to evaluate on")
    add("--seed", type=count, default=0, help="of the rows' order")
    add("--dtype", choices=dtypes, help="in training; the folder keeps its own")
    add("--way", default="auto", choices=["auto", *WAYS], help="where the weights are")
    add("--device-memory", type=size, help="such as 24GiB; None: the device's own")
    add("--min-size", type=size, default="256KiB", help=SMALL)
    add("--save-every", type=some, default=200, help="steps between checkpoints")
    add("--stop-after", type=count, default=0, help="save after this step, and stop")
    add("--log-every", type=some, default=10, help="steps, where no terminal is")
    add("--report-to", default="none", choices=["none", "tensorboard", "wandb"])
    return parser.parse_args(argv)


def at_least(
    least: float, kind: Callable[[str], float], *, below: float = math.inf
) -> Callable[[str], float]:
    """What reads a number from `least` on, and less than `below`."""

    def number(text: str) -> float:
        read = kind(text)
        if not least <= read < below:
            most = f" and below {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text} is not from {least} on{most}")
        return read

    return number


def above(least: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    """What reads a number that is more than `least`."""

    def number(text: str) -> float:
        read = kind(text)
        if not least < read < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not more than {least}")
        return read

    return number


def size(text: str) -> str:
    """Checks that a text is a size in bytes."""
    if not re.fullmatch(r"[0-9]+([.][0-9]+)? ?([KMGT]i?B|B)?", text):
        raise argparse.ArgumentTypeError(f"{text} is no size, such as 24GiB")
    return text
