"""The time of AdamW with moments in eight bits, beside bitsandbytes and torchao.

All run on the CPU, with as many threads, and take equal steps: the same parameters,
of one leaf, the same gradients, updated in place. They take turns, in an order that
turns around each time, and a ratio compares turns of one round.
"""

import dataclasses
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from shapes import fill

import paged_optax as po

SECTION = "eight bits"
EXACT = "optax.adamw, 32 bits"
HYPERPARAMETERS = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
LEARNING_RATE = 1e-3
STEPS = 3  # of a turn; the first meets its buffers


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One optimizer with its own parameters, gradients and state.

    Attributes:
      step: Updates the parameters, and returns when that is done.
      parameters: The parameters as they are now.
      version: The library and its version.
    """

    step: Callable[[], Any]
    parameters: Callable[[], np.ndarray]
    version: str


def contestants() -> dict[str, Callable[[np.ndarray, np.ndarray], Contestant]]:
    """Who runs: a function of parameters and gradients for each."""
    eight_bits = lambda **how: _optax(
        po.paged_adamw_8bit(LEARNING_RATE, **HYPERPARAMETERS, **how)
    )
    return {
        EXACT: _optax(optax.adamw(LEARNING_RATE, **HYPERPARAMETERS)),
        "paged_adamw_8bit, resident": eight_bits(device_budget=None),
        "paged_adamw_8bit, paged": eight_bits(),
        "bitsandbytes.optim.AdamW8bit": _bitsandbytes,
        "torchao.optim.AdamW8bit": _torchao,
    }


#: The libraries, and ours that are to be no slower than the faster of them.
_ORACLES = ("bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit")
_JUDGED = ("paged_adamw_8bit, resident", "paged_adamw_8bit, paged")


def _optax(
    tx: optax.GradientTransformation,
) -> Callable[[np.ndarray, np.ndarray], Contestant]:
    def build(values: np.ndarray, slopes: np.ndarray) -> Contestant:
        def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        params, gradients = jax.device_put((values, slopes))
        params = jax.numpy.copy(params)  # as it is donated
        state = tx.init(params)
        jitted = po.jit_step(update, params, state, gradients, donate_argnums=(0, 1))
        kept = [params, state]

        def step() -> None:
            kept[:] = jax.block_until_ready(jitted(*kept, gradients))

        return Contestant(step, lambda: np.asarray(kept[0]), f"jax {jax.__version__}")

    return build


def _bitsandbytes(values: np.ndarray, slopes: np.ndarray) -> Contestant:
    from bitsandbytes.optim import AdamW8bit

    return _torch(AdamW8bit, "bitsandbytes", values, slopes)


def _torchao(values: np.ndarray, slopes: np.ndarray) -> Contestant:
    from torchao.optim import AdamW8bit  # its first step compiles, with C++

    return _torch(AdamW8bit, "torchao", values, slopes)


def _torch(
    optimizer: Callable[..., Any], library: str, values: np.ndarray, slopes: np.ndarray
) -> Contestant:
    import torch

    torch.set_num_threads(threads())
    parameter = torch.nn.Parameter(torch.tensor(values))
    parameter.grad = torch.tensor(slopes)
    own = HYPERPARAMETERS.copy()
    betas = own.pop("b1"), own.pop("b2")
    tx = optimizer([parameter], lr=LEARNING_RATE, betas=betas, **own)
    version = f"{library} {importlib.metadata.version(library)}"
    version += f", torch {torch.__version__}"
    return Contestant(tx.step, lambda: parameter.detach().numpy(), version)


def threads() -> int:
    """The cores this process may use: XLA takes as many, and all others are told to."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure(width: int, rounds: int) -> list[dict[str, Any]]:
    """Times an update of one `width` x `width` leaf.

    Args:
      width: Rows and columns.
      rounds: How often everyone has a turn.

    Returns:
      A row a contestant: seconds, and their ratio to the faster library's; or a reason.
    """
    shape = {"leaf": (width, width)}
    values, slopes = (np.asarray(fill(shape, x)["leaf"]) for x in (0.02, 1e-3))
    row = lambda name, **figures: {"section": SECTION, "name": name, **figures}
    rows: dict[str, dict[str, Any]] = {}
    running: dict[str, Contestant] = {}
    for name, build in contestants().items():
        try:
            contestant = build(values, slopes)
            contestant.step()  # warms up; torchao compiles here
            running[name] = contestant
        except ModuleNotFoundError as error:
            rows[name] = row(name, reason=f"not measured: {error.name} not installed")
        except RuntimeError as error:  # torchao's, where there is no C++ compiler
            first = (str(error).splitlines() or [repr(error)])[0][:300]
            rows[name] = row(name, reason=f"not measured: the first step: {first}")

    turns: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds):
        for name in list(running)[:: -1 if number % 2 else 1]:
            steps = []
            for _ in range(STEPS):
                before = time.perf_counter()
                running[name].step()
                steps.append(time.perf_counter() - before)
            turns[name].append(statistics.median(steps[1:]))

    oracles = [turns[name] for name in _ORACLES if name in turns]
    faster = [min(each) for each in zip(*oracles, strict=True)]
    exact = running[EXACT].parameters()
    moved = np.abs(exact - values).mean()
    for name, contestant in running.items():
        ratios = [x / y for x, y in zip(turns[name], faster, strict=False)]
        ratio = statistics.median(ratios) if ratios else None
        target = 1.0 if name in _JUDGED and ratios else None
        rows[name] = row(
            name,
            version=contestant.version,
            parameters=values.size,
            threads=threads(),
            rounds=rounds,
            seconds=statistics.median(turns[name]),
            seconds_range=[min(turns[name]), max(turns[name])],
            ratio=ratio,
            ratio_range=[min(ratios), max(ratios)] if ratios else None,
            target=target,
            within_target=None if None in (target, ratio) else ratio <= target,
            # That all did the same work: how far from float32's parameters theirs are.
            share_of_the_way_off=float(
                np.abs(contestant.parameters() - exact).mean() / moved
            ),
        )
    return [rows[name] for name in contestants()]
