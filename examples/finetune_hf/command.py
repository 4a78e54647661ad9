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
from .display import progress, reporter
from .folder import FolderError, refuse_existing
from .run import POOL, Run, in_units, merge, pinned_gigabytes
from .store import Store, working


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    # XLA's pool would grow to twice what is needed, and end at 64 GiB.
    os.environ[POOL] = str(pinned_gigabytes())
    with contextlib.suppress(RuntimeError):  # JAX has begun already
        if args.devices > 1:
            jax.config.update("jax_num_cpu_devices", args.devices)
    try:
        if args.resume and args.output.exists():
            left = f", and {working(args.output)} can be removed"
            left *= working(args.output).exists()
            raise FolderError(f"{args.output} exists: the run is complete{left}.")
        refuse_existing(args.output)
        if args.text is None:
            merge(args)
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
    """Trains, from the start or from the last checkpoint, and writes the folder."""
    args, host = run.args, run.host_bytes()
    run.refuse_small_host(host)
    _, left = run.folder.beside(*run.method.takes)
    store.take(anew=not args.resume)
    learned = sum(int(row["weights"].sum()) for row in run.train)
    held = f", and {len(run.held_out)} rows to evaluate on" if run.held_out else ""
    rows = f"{len(run.train)} rows of {args.length} tokens"
    print(f"text: {rows}, of which {learned} are learned{held}")
    if left:
        print(f"not copied from {run.folder.path}: {', '.join(left)}")
    print(f"way: {run.way} ({WAYS[run.way][1]}), {in_units(host)} of host memory")
    print(f"method: {run.method.name}")
    rate = f"learning rate up to {args.learning_rate:g}, {args.lr_scheduler_type}"
    print(f"steps: {run.steps} of {args.batch} rows, one at a time a device; {rate}")
    report = reporter(args.report_to, vars(args))
    start = store.manager.latest_step() or 0
    carry = store.restore(run.target()) if start else run.carry()
    store.begin()
    began = time.perf_counter()
    print("compiling", flush=True)
    step = run.step(carry)
    print(f"compiled in {time.perf_counter() - began:.0f} seconds", flush=True)
    asked, stops, every = asked_to_stop(), False, max(1, run.steps // 10)
    given = itertools.islice(run.batches(), start, run.steps)
    shows = progress(run.steps, start, args.log_every)
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
            ends = number == run.steps
            is_due = run.held_out and (ends or number % every == 0)
            held = run.evaluated(carry[0], run.held_out) if is_due else ""
            note(number, loss, held)
            shown(number, loss, rate, held)
            values = {"loss": loss, "held out": held, "tokens/s": rate}
            report(number, {name: x for name, x in values.items() if x != ""})
            stops = not ends and bool(asked or number == args.stop_after)
            if ends or stops or number % args.save_every == 0:
                store.save(number, carry)
            if stops:
                break
    store.manager.close()
    if stops:
        again = shlex.join([*sys.argv, *["--resume"] * (not args.resume)])
        print(f"stopped after step {number}/{run.steps}. To continue: python {again}")
        sys.exit(128 + asked[0] if asked else 0)
    run.method.write(run.folder, args.output, run.split, carry[0])
    for name in ("losses.csv", "run.json"):
        shutil.copy(store.path / name, args.output / name)
    shutil.rmtree(store.path)
    print(f"wrote {args.output}")
    if parts := run.decoder.untrained(run.folder):
        print(f"not trained: {' and '.join(parts)}, which are as they were")
    if args.method == "qlora":
        print(run.compared(carry[0]))


def asked_to_stop() -> list[int]:
    """Returns the signals to stop after a step, as they come; two stop at once."""
    asked = list[int]()

    def stop(number: int, frame: object) -> None:
        print("\nstopping after this step; once more: at once", flush=True)
        asked.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return asked
