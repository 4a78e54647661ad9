"""The command: trains, stops when asked to, and goes on."""

import contextlib
import itertools
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence

import jax

import paged_optax as po

from .arguments import WAYS, parse_arguments
from .display import picture, progress, reporter
from .folder import FolderError, refuse_existing
from .run import POOL, Run, merge, pinned_gigabytes
from .store import Store, working


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse_arguments(argv)
    # XLA's pool would grow to twice what is needed, and end at 64 GiB.
    os.environ[POOL] = str(pinned_gigabytes())
    with contextlib.suppress(RuntimeError):  # JAX has begun already
        if args.devices > 1:
            jax.config.update("jax_num_cpu_devices", args.devices)
    try:
        if args.resume and args.output.exists():
            raise FolderError(
                f"{args.output} exists: the run is complete, and"
                f" {working(args.output)} can be removed."
            )
        refuse_existing(args.output)
        if args.text is None:
            merge(args)
            print(f"wrote {args.output}")
        else:
            run = Run.of(args)
            store = Store.of(args, run.folder, [*run.train, *run.held_out])
            with contextlib.closing(store):
                train(run, store)
    except (FolderError, po.SplitError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped before a step: nothing new was trained", file=sys.stderr)
        return 130
    return 0


def train(run: Run, store: Store) -> None:
    """Trains, from the start or from where the last command stopped."""
    host = run.host_bytes()
    run.refuse_small_host(host)
    _, left = run.folder.beside(*run.method.takes)
    store.take(anew=not run.args.resume)
    learned = sum(int(row["weights"].sum()) for row in run.train)
    count, length = len(run.train), run.args.length
    print(f"text: {count} rows of {length} tokens, of which {learned} are learned")
    if left:
        print(f"not taken over from {run.folder.path}: {', '.join(left)}")
    there = f"{host / 2**30:.1f} GiB of host memory"
    print(f"way: {run.way} ({WAYS[run.way][1]}), {there}")
    report = reporter(run.args.report_to, vars(run.args))
    start = store.latest() or 0
    carry = store.restore(start, run.target()) if start else run.carry()
    store.begin()
    began = time.perf_counter()
    print("compiling", flush=True)
    step = run.step(carry)
    print(f"compiled in {time.perf_counter() - began:.0f} seconds", flush=True)
    asked = asked_to_stop()
    given = itertools.islice(run.batches(), start, run.steps)
    shows = progress(run.steps, start, run.args.log_every)
    with store.losses(start) as note, shows as shown:
        for number, batch in enumerate(given, start + 1):
            began = time.perf_counter()
            *carry, output = step(*carry, batch, *run.frozen)
            loss = float(output.loss)
            if not math.isfinite(loss):
                raise FolderError(
                    f"the loss of step {number} is {loss}: give less --learning-rate."
                )
            rate = batch["tokens"].size / (time.perf_counter() - began)
            held = run.evaluated(carry[0], run.held_out) if due(run, number) else ""
            note(number, loss, held)
            shown(number, loss, rate, held)
            report(number, {"loss": loss, "held out": held, "tokens/s": rate})
            last = asked or number == run.args.stop_after
            if last or number % run.args.save_every == 0 or number == run.steps:
                store.save(number, carry)
            if last:
                break
    store.manager.close()
    if start < run.steps and last:
        again = shlex.join([*sys.argv, *["--resume"] * (not run.args.resume)])
        print(f"stopped after step {number}. To go on: python {again}")
        sys.exit(128 + asked[0] if asked else 0)
    run.method.write(run.folder, run.args.output, run.split, carry[0])
    for name in ("losses.csv", "run.json"):
        shutil.copy(store.path / name, run.args.output / name)
    picture(run.args.output / "losses.csv", run.args.output / "losses.png")
    shutil.rmtree(store.path)
    print(f"wrote {run.args.output}")
    if parts := run.decoder.untrained(run.folder):
        print(f"not trained: {' and '.join(parts)}, which are as they were")
    if run.args.method == "qlora":
        print(run.compared(carry[0]))


def asked_to_stop() -> list[int]:
    """The signals that will have asked to; the step that runs comes to its end.

    A second one ends the command at once.
    """
    asked = list[int]()

    def stop(number: int, frame: object) -> None:
        print("\nstopping after this step; once more: at once", flush=True)
        asked.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return asked


def due(run: Run, number: int) -> bool:
    """Whether the held-out loss is computed after this step."""
    every = max(1, run.steps // 10)
    return bool(run.held_out) and (number % every == 0 or number == run.steps)
