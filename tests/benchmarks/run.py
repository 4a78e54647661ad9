"""Checks and measures `paged_optax` on whatever backend is there, in one command.

    python tests/benchmarks/run.py            # a few minutes; no arguments needed
    python tests/benchmarks/run.py --quick    # seconds: does everything run?

Prints tables and writes them as JSON, with versions and device, to
`tests/benchmarks/results/<backend>-<device>-jax<version>.json`:

- numbers: paged optimizers against Optax's on this backend, bit differences counted;
- link: its rate to the device, to the host, and both at once;
- update: seconds and peak device bytes of `optax.adamw` resident, offloaded as a
  whole tree, and paged;
- layerwise: seconds of a training step with one layer's gradients alive, beside an
  ordinary one;
- decoder: seconds and peak of steps of Llama 3 8B, on a GPU, beside the step model's;
- tracing: at Llama 3 8B's 291 leaves, against `optax.adamw`.

On a GPU that this has not run on, `first_minutes.py` comes first.

What could not run is listed with its reason. Needs jax, optax, numpy and jaxtyping;
runs on the checkout it lies in, installed or not. Each part runs in a process of its
own, so that a peak is that of one contestant and a crash costs one row.

Exits with 1 if numbers are wrong or a part broke. A ratio above its target is
marked and is no failure: a busy machine can cause it.
"""

import argparse
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


# --- Parts: each runs in a process of its own -------------------------------------


def work(part: str, arguments: dict[str, Any]) -> Any:
    """Runs one part in this process."""
    if part == "machine":
        from helpers.machine import describe

        return describe()
    if part == "first minutes":
        import first_minutes

        return first_minutes.CHECKS[arguments.pop("name")](**arguments)
    if part == "numbers":
        import checks

        return checks.check(**arguments)
    if part == "link":
        import link

        return link.rows(**arguments)
    if part == "update":
        import updates

        return updates.measure(**arguments)
    if part == "peak":
        import updates

        return updates.peak(**arguments)
    if part == "layerwise":
        import layerwise

        return layerwise.measure(**arguments)
    if part == "decoder":
        import decoders

        return decoders.measure(**arguments)
    import tracing

    return tracing.trace(**arguments)


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
            how = (
                f"killed by signal {-done.returncode}: " if done.returncode < 0 else ""
            )
            print(done.stderr[-4000:], file=sys.stderr, flush=True)
            raise PartError(how + (named or lines)[-1][:300])
        return json.loads(result.read_text())


# --- The whole --------------------------------------------------------------------


class Benchmark:
    """Runs the parts one after the other and collects their rows."""

    def __init__(self, quick: bool, budget: float = BUDGET, device_only: bool = False):
        self.quick = quick
        self.budget = budget
        self.device_only = device_only
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
        left = self.budget - (time.monotonic() - self.started)
        try:
            if left < 5:
                raise PartError(f"no time left: {self.budget:.0f} s for all")
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
        self.say("numbers: paged against Optax on this backend")
        self.collect(self.attempt("numbers", 150, quick=self.quick))
        self.say("link")
        size = (64 if self.quick else 1024) << 20
        self.collect(
            self.attempt("link", 90, size=size, repeats=3 if self.quick else 9)
        )
        self.decoders(on_gpu=machine["backend"] == "gpu")
        sizes = (
            {"8 x 512x512": (2, 2)}
            if self.quick
            else {"8 x 2048x2048": (40, 15), "0.1 B": (30, 9), "1 B": (20, 9)}
        )
        for size, (seconds, rounds) in sizes.items():
            self.say(f"update, {size}: time")
            rows = self.attempt(
                "update", 150, size=size, seconds=seconds, rounds=rounds
            )
            for row in rows or []:
                if "reason" not in row:
                    self.peak(row, counted=machine["device_bytes"] is not None)
            self.collect(rows)
        self.say("layerwise: a training step")
        size = {"hidden": 128, "layers": 2, "rounds": 2}
        if not self.quick:
            size = {"hidden": 1024, "layers": 8, "rounds": 9}
        self.collect(self.attempt("layerwise", 150, **size))
        if not self.device_only:
            self.say("tracing, 291 leaves")
            # Shapes alone: the accelerator is not needed, nor its self-check timed.
            cpu = {"JAX_PLATFORMS": "cpu"}
            self.collect(self.attempt("tracing", 90, quick=self.quick, env=cpu))
        flags = [" --quick"] * self.quick + [" --device-only"] * self.device_only
        return {
            "program": "".join(["tests/benchmarks/run.py", *flags]),
            **machine,
            "load_average_after": list(os.getloadavg()),
            "seconds": round(time.monotonic() - self.started, 1),
            "rows": self.rows,
            "not_run": self.not_run,
        }

    def decoders(self, on_gpu: bool) -> None:
        """Steps of a whole decoder; without a GPU a small one shows that they run."""
        import decoders

        size = {"size": "small", "sequences": 2, "steps": 2}
        if on_gpu and not self.quick:
            size = {"size": "Llama 3 8B", "sequences": 8, "steps": 5}
        elif not self.quick:
            return
        # The resident step needs more of the device than JAX takes by default.
        env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
        for way in decoders.WAYS:
            self.say(f"decoder, {size['size']}: {way}")
            row = self.attempt("decoder", 150, way=way, env=env, **size)
            self.collect([row] if row else None)

    def peak(self, row: Row, counted: bool) -> None:
        """Adds a contestant's peak device bytes, and where the figure comes from.

        Args:
          row: The row.
          counted: Whether the backend's allocator counts its bytes.
        """
        row["peak_device_bytes"] = row["xla_total_bytes"]
        row["peak_source"] = (
            "XLA's buffer assignment"
            if row["xla_tells_host_from_device"]
            else "XLA's buffer assignment, device and host memory together"
        )
        if counted:
            size, name = row["size"], row["contestant"]
            self.say(f"update, {size}: peak of {name}")
            if found := self.attempt("peak", 60, size=size, name=name):
                row |= found
                row["peak_source"] = "peak_bytes_in_use of a process of its own"


def path_of(result: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Where a result is written: one file a backend, device kind and jax version."""
    kind = re.sub(r"[^a-z0-9]+", "-", result["device_kind"].lower()).strip("-")
    version = result["versions"]["jax"]
    return folder / f"{result['backend']}-{kind}-jax{version}.json"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and few repeats: shows that everything runs, and times"
        " nothing worth keeping; written only where --out says",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where the JSON goes (default: results/ beside this file)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET,
        metavar="SECONDS",
        help="after which no further part is started (default: %(default)s)",
    )
    parser.add_argument(
        "--device-only",
        action="store_true",
        help="leaves out what is measured on the CPU in any case",
    )
    for name in ("--part", "--arguments", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Runs everything, or one part where this process was started for it."""
    args = parse_arguments()
    if args.part:
        found = work(args.part, json.loads(args.arguments))
        pathlib.Path(args.result).write_text(json.dumps(found))
        return 0
    benchmark = Benchmark(args.quick, args.budget, args.device_only)
    result = benchmark.run()
    print(f"\n{show(result)}\n\n{result['seconds']:.0f} s", flush=True)
    folder = args.out or (None if args.quick else FOLDER / "results")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        path = path_of(result, folder)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"Wrote {path}", flush=True)
    wrong = [row["name"] for row in result["rows"] if row.get("right") is False]
    if wrong:
        print(f"WRONG NUMBERS: {', '.join(wrong)}", flush=True)
    return 1 if wrong or benchmark.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
