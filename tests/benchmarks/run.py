"""Checks and measures `paged_optax` on whatever backend is there, in one command.

    python tests/benchmarks/run.py              # a few minutes; no arguments needed
    python tests/benchmarks/run.py --quick      # seconds: does everything run?
    python tests/benchmarks/run.py --checks     # what comes first on a new GPU
    python tests/benchmarks/run.py --tokens     # whole decoders, many micro-batches
    python tests/benchmarks/run.py --profile    # where a step's time goes
    python tests/benchmarks/run.py --tokens --modelled --card rtx4090

Prints tables and writes them as JSON, with versions and device, to
`tests/benchmarks/results/<backend>-<device>-jax<version>.json`:

- numbers: paged optimizers against Optax's on this backend, bit differences counted;
- link: its rate to the device, to the host, and both at once;
- update: seconds of `optax.adamw` resident, offloaded as a whole tree, and paged;
- tokens: seconds and tokens a second of training steps of Llama-3-8B, on a GPU, beside
  the step model's; elsewhere of a small decoder.

`--tokens` has Llama-3-8B and Qwen3-4B, resident and layerwise, at 1, 16 and 128
micro-batches of 4,096 tokens. `--profile` splits the resident and the layerwise step
into products, attention, transfers and more, as a table and a picture: by XLA's trace
on a GPU. `--modelled` compiles the same programs for a card that is not here, and
takes the step model's figures; so does `--profile` without a GPU.

`--checks` has, in a quarter of an hour, each with a limit of its own, and written as
soon as it has ended:

- graphs: 20 steps with CUDA graphs and without compute the same numbers;
- half budget: 200 steps of AdamW with half of the moments on the device compute Optax's
  numbers, bit for bit where the compiler adds alike;
- large leaves: moments beyond 2^32 bytes come back bit for bit, by page and whole;
- activations: `layerwise_step` computes the same with `activations_on_host`;
- ends: so it does without loops of their own for the first and the last layer;
- O1: and at XLA's optimization level, with the passes off that lose addresses;
- update: leaves of 1, 4, 16 and 64 MiB in pages of 1 MiB and by default.

What could not run is listed with its reason. Needs jax, optax, numpy and jaxtyping;
runs on the checkout it lies in, installed or not. Each part runs in a process of its
own, so that a peak is that of one contestant and a crash costs one row.

Exits with 1 if numbers are wrong or a part broke. A ratio above its target is
marked and is no failure: a busy machine can cause it.
"""

import argparse
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from tables import Row, show

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))  # this checkout, installed or not
sys.path.insert(1, str(FOLDER.parent))  # for `helpers`

#: Seconds after which no further part is started, unless told.
BUDGET = 480
#: The same of whole decoders.
LONG_BUDGET = 7200


# --- Parts: each runs in a process of its own -------------------------------------


#: The module and the function of each.
PARTS = {
    "machine": ("helpers.machine", "describe"),
    "numbers": ("checks", "numbers"),
    "checks": ("checks", "check"),
    "link": ("checks", "link"),
    "update": ("updates", "measure"),
    "measure": ("tokens", "measure"),
    "modelled": ("tokens", "modelled"),
}


def work(part: str, arguments: dict[str, Any]) -> Any:
    """Runs one part in this process."""
    module, function = PARTS[part]
    return getattr(importlib.import_module(module), function)(**arguments)


class PartError(RuntimeError):
    """A part ended without a result."""


def run_part(
    part: str, *, timeout: float, env: dict[str, str] | None = None, **arguments: Any
) -> Any:
    """Runs one part in a fresh process.

    Args:
      part: Its name.
      timeout: Seconds it may take.
      env: Further environment variables.
      **arguments: Its arguments.

    Returns:
      What it returned.

    Raises:
      PartError: If it failed, crashed or took too long; the message says which.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        command = [sys.executable, str(FOLDER / "run.py"), "--part", part]
        command += ["--arguments", json.dumps(arguments), "--result", str(result)]
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | (env or {}),
                stderr=subprocess.PIPE,
                text=True,
                timeout=max(timeout, 1),
            )
        except subprocess.TimeoutExpired:
            raise PartError(f"took more than {timeout:.0f} s") from None
        if done.returncode or not result.exists():
            lines = [x for x in done.stderr.splitlines() if x.strip()] or ["no message"]
            named = [x for x in lines if re.match(r"[\w.]*(Error|Exception)\b", x)]
            print(done.stderr[-4000:], file=sys.stderr, flush=True)
            code, said = done.returncode, (named or lines)[-1][:300]
            raise PartError(f"killed by signal {-code}: {said}" if code < 0 else said)
        return json.loads(result.read_text())


# --- The whole --------------------------------------------------------------------


#: JAX takes less of the device by default than the resident step needs.
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
#: The compilers of cards that are not here run on the CPU.
_COMPILER = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}


#: Seconds that each check may take.
CHECKS = {
    "graphs": 120,
    "half budget": 45,
    "large leaves": 60,
    "activations": 60,
    "ends": 120,
    "O1": 120,
}
#: Whose updates are measured beside them.
NAMES = ["paged, default", "paged, pages of 1 MiB"]


class Benchmark:
    """Runs the parts one after the other and collects their rows."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.quick = args, args.quick
        self.started = time.monotonic()
        self.rows: list[Row] = []
        self.not_run: list[Row] = []
        self.broken = False

    def say(self, text: str) -> None:
        """Prints with the time since the start, at once."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def attempt(self, part: str, limit: float, **arguments: Any) -> Any:
        """Runs a part within the time left; None, and a row, if it does not end."""
        env = arguments.pop("env", None)
        label = " ".join([part, *(x for x in arguments.values() if type(x) is str)])
        left = self.args.budget - (time.monotonic() - self.started)
        try:
            if left < 5:
                raise PartError(f"no time left: {self.args.budget:.0f} s for all")
            return run_part(part, timeout=min(limit, left), env=env, **arguments)
        except PartError as error:
            self.say(f"{label}: could not run: {error}")
            self.not_run.append({"section": part, "name": label, "reason": str(error)})
            self.broken = True
            return None

    def collect(self, rows: list[Row] | None) -> None:
        """Sorts a part's rows into those that ran and those that did not."""
        for row in rows or []:
            (self.not_run if "reason" in row else self.rows).append(row)

    def run(self) -> dict[str, Any]:
        """Everything.

        Returns:
          What goes into the JSON file.
        """
        self.say("machine")
        machine = run_part("machine", timeout=120)
        print(
            f"{machine['backend']}: {machine['device_kind']}, jax "
            f"{machine['versions']['jax']}, {machine['cpus']} cores, "
            f"{machine['host_bytes_available'] / 1e9:.1f} GB of memory free, load "
            f"{machine['load_average'][0]:.1f}",
            flush=True,
        )
        on_gpu = machine["backend"] == "gpu"
        if self.args.profile:
            self.args.modelled |= not on_gpu
        if self.args.checks:
            self.checks(machine)
        elif not self.args.tokens and not self.args.profile:
            self.pages()
        if not self.args.checks:
            self.tokens(on_gpu)
        return self.result(machine)

    def result(self, machine: dict[str, Any]) -> dict[str, Any]:
        """The contents of the JSON file."""
        return {
            "program": " ".join(["tests/benchmarks/run.py", *sys.argv[1:]]),
            **machine,
            "load_average_after": list(os.getloadavg()),
            "seconds": round(time.monotonic() - self.started, 1),
            "rows": self.rows,
            "not_run": self.not_run,
        }

    def checks(self, machine: dict[str, Any]) -> None:
        """The same numbers in every way, and pages of 1 MiB."""
        small = self.quick or machine["backend"] != "gpu"
        for name, limit in CHECKS.items():
            self.say(name)
            row = self.attempt("checks", limit, name=name, small=small, env=MEMORY)
            self.collect([row] if row else None)
            write(self.args, self.result(machine))
        for width in (512,) if small else (512, 1024, 2048, 4096):
            how = {"seconds": 8, "rounds": 2 if small else 9, "names": NAMES}
            found = self.attempt("update", 90, size=f"8 x {width}x{width}", **how)
            self.collect(found)

    def pages(self) -> None:
        """Numbers, the link, and updates."""
        self.say("numbers: paged against Optax on this backend")
        self.collect(self.attempt("numbers", 150, quick=self.quick))
        self.say("link")
        size = (64 if self.quick else 1024) << 20
        repeats = 3 if self.quick else 9
        self.collect(self.attempt("link", 90, size=size, repeats=repeats))
        sizes = {"8 x 2048x2048": (40, 15), "0.1 B": (30, 9), "1 B": (20, 9)}
        sizes = {"8 x 512x512": (2, 2)} if self.quick else sizes
        for size, (seconds, rounds) in sizes.items():
            self.say(f"update, {size}")
            how = {"size": size, "seconds": seconds, "rounds": rounds}
            self.collect(self.attempt("update", 150, **how))

    def tokens(self, on_gpu: bool) -> None:
        """Steps of whole decoders."""
        import tokens

        args, part, more = self.args, "measure", {"steps": 2, "env": MEMORY}
        large = (on_gpu or args.modelled) and not self.quick
        models = ["Llama-3-8B", "Qwen3-4B"] if args.tokens else ["Llama-3-8B"]
        ways = list(tokens.WAYS)[: 5 if args.tokens else 2 if self.quick else 7]
        counts = [1]
        if args.tokens:
            counts = list(tokens.COUNTS) if large else [1, 3]
        if args.profile:
            ways, more = [tokens.RESIDENT, tokens.LAYERWISE], more | {"traced": True}
        if args.modelled:
            part, more = "modelled", {"card": args.card, "env": _COMPILER}
        for model in args.models or (models if large else ["small"]):
            for way in args.ways or ways:
                for count in args.counts or counts:
                    self.say(f"{part}, {model}, {count} micro-batches: {way}")
                    how = {"model": model, "way": way, "count": count}
                    row = self.attempt(part, 600, **how, **more)
                    self.collect([row] if row else None)


def write(args: argparse.Namespace, result: dict[str, Any]) -> pathlib.Path | None:
    """Writes a file for a backend, device kind and jax version; None: there is none."""
    folder = args.out or (None if args.quick else FOLDER / "results")
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    kind = re.sub(r"[^a-z0-9]+", "-", result["device_kind"].lower()).strip("-")
    parts = [x for x in ("checks", "profile", "tokens") if getattr(args, x)]
    parts += [f"modelled-{args.card}"] * args.modelled
    name = "-".join([*parts, result["backend"], kind])
    path = folder / f"{name}-jax{result['versions']['jax']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    small = "small sizes: does everything run? Written only where --out says"
    add("--quick", action="store_true", help=small)
    where = "where the JSON goes (default: results/ beside this file)"
    add("--out", type=pathlib.Path, metavar="FOLDER", help=where)
    add("--checks", action="store_true", help="what comes first on a new GPU")
    add("--budget", type=float, metavar="SECONDS", help="no part starts later")
    add("--tokens", action="store_true", help="whole decoders, many micro-batches")
    add("--profile", action="store_true", help="where a step's time goes")
    add("--modelled", action="store_true", help="by the step model, nothing is run")
    add("--card", default="h200", help="of --modelled (default: %(default)s)")
    add("--models", nargs="+", help="these alone, as `tokens.MODELS` names them")
    add("--ways", nargs="+", help="these alone, as `tokens.WAYS` names them")
    add("--counts", nargs="+", type=int, help="micro-batches of a step")
    for name in ("--part", "--arguments", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    long = LONG_BUDGET if args.tokens or args.profile else BUDGET
    args.budget = args.budget or (870 if args.checks else long)
    return args


def main() -> int:
    """Runs everything, or one part where this process was started for it."""
    args = parse_arguments()
    if args.part:
        found = work(args.part, json.loads(args.arguments))
        pathlib.Path(args.result).write_text(json.dumps(found))
        return 0
    benchmark = Benchmark(args)
    result = benchmark.run()
    print(f"\n{show(result)}\n\n{result['seconds']:.0f} s", flush=True)
    if path := write(args, result):
        print(f"Wrote {path}", flush=True)
        if args.profile and result["rows"]:
            import shares

            shares.draw(result["rows"], path.with_suffix(".png"))
    wrong = [row["name"] for row in result["rows"] if row.get("right") is False]
    if wrong:
        print(f"WRONG NUMBERS: {', '.join(wrong)}", flush=True)
    return 1 if wrong or benchmark.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
