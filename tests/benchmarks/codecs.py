"""Seconds a value of encoding and decoding, and of the searches they do without.

Run alone: `python tests/benchmarks/codecs.py [--quick]`. Where bitsandbytes is
installed its CPU kernels are timed beside.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_optax.codecs import (
    BFloat16Codec,
    DynamicInt4,
    DynamicInt8,
    Float8E4M3,
    Quantized,
    draw,
    packing,
)
from paged_optax.codecs.dynamic_int8 import dynamic_map

SECTION = "codecs"


def measure(quick: bool) -> list[dict[str, Any]]:
    """Nanoseconds a value, a row for each codec and each other way."""
    size, repeats = (2**18, 3) if quick else (2**22, 7)
    rows = []
    for signed in (True, False):
        rng = np.random.default_rng(0)
        x = rng.standard_normal(size).astype(np.float32)
        x = jnp.asarray(x if signed else x * x)
        kind = "signed" if signed else "unsigned"
        codec = DynamicInt8(signed)
        stored = jax.jit(codec.encode)(x)
        contestants = {
            f"encode int8 {kind}, arithmetic": (codec.encode, x),
            f"encode int8 {kind}, binary search": (_search(signed), x),
            f"encode int8 {kind}, all 255 midpoints": (_compare_all(signed), x),
            f"decode int8 {kind}, arithmetic": (_decode(codec, x.shape), stored),
            f"decode int8 {kind}, gather": (_gather(signed), stored),
        }
        others = {f"int4 {kind}": DynamicInt4(signed)}
        if signed:
            others |= {"float8": Float8E4M3(), "bfloat16": BFloat16Codec()}
            random = BFloat16Codec(stochastic=True)
            noise = draw(jax.random.key(0), 0)
            encode = lambda x, c=random, noise=noise: c.encode(x, noise)
            contestants["encode bfloat16 stochastic"] = (encode, x)
        for name, other in others.items():
            contestants[f"encode {name}"] = (other.encode, x)
            made = jax.jit(other.encode)(x)
            contestants[f"decode {name}"] = (_decode(other, x.shape), made)
        for name, (function, argument) in contestants.items():
            seconds = best(jax.jit(function), argument, repeats=repeats)
            rows.append(_row(name, seconds / size))
        rows += [
            _row(f"{what} int8 {kind}, bitsandbytes", seconds / size)
            for what, seconds in _bitsandbytes(np.asarray(x), signed, repeats).items()
        ]
    return rows


def best(function: Callable[..., Any], *args: Any, repeats: int) -> float:
    """The least seconds of several calls, after one that compiles."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _row(name: str, seconds: float) -> dict[str, Any]:
    return {"section": SECTION, "name": name, "nanoseconds_a_value": seconds * 1e9}


def _decode(codec: Any, shape: tuple[int, ...]) -> Callable[..., Any]:
    return lambda stored: codec.decode(stored, shape)


def _midpoints(signed: bool) -> np.ndarray:
    numbers = dynamic_map(signed)
    return (numbers[1:] + numbers[:-1]) / np.float32(2)


def _scaled(x: Any) -> tuple[Any, Any]:
    rows = packing.to_blocks(x, 256)
    scales = packing.block_absmax(rows)
    return rows * (np.float32(1) / scales)[:, None], scales


def _search(signed: bool) -> Callable[..., Any]:
    """Eight look-ups a value."""
    table = np.append(_midpoints(signed), np.float32(np.inf))

    def encode(x: Any) -> Quantized[Any]:
        scaled, scales = _scaled(x)
        codes = jnp.zeros(scaled.shape, jnp.int32)
        for half in (128, 64, 32, 16, 8, 4, 2, 1):
            above = scaled > jnp.asarray(table)[codes + (half - 1)]
            codes = jnp.where(above, codes + half, codes)
        return Quantized(codes.astype(jnp.uint8).reshape(x.shape), scales)

    return encode


def _compare_all(signed: bool) -> Callable[..., Any]:
    """As many comparisons as there are midpoints."""

    def encode(x: Any) -> Quantized[Any]:
        scaled, scales = _scaled(x)
        codes = jnp.zeros(scaled.shape, jnp.int32)
        for midpoint in _midpoints(signed):
            codes = codes + (scaled > midpoint)
        return Quantized(codes.astype(jnp.uint8).reshape(x.shape), scales)

    return encode


def _gather(signed: bool) -> Callable[..., Any]:
    def decode(stored: Quantized[Any]) -> Any:
        codes = packing.to_blocks(stored.codes, 256).astype(jnp.int32)
        return jnp.asarray(dynamic_map(signed))[codes] * stored.scales[:, None]

    return decode


def _bitsandbytes(x: np.ndarray, signed: bool, repeats: int) -> dict[str, float]:
    try:
        import torch
        from bitsandbytes.functional import create_dynamic_map
    except ImportError:
        return {}
    numbers, given = create_dynamic_map(signed), torch.tensor(x)
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(given, numbers, 256)
    encode = lambda: torch.ops.bitsandbytes.quantize_blockwise(given, numbers, 256)
    decode = lambda: torch.ops.bitsandbytes.dequantize_blockwise(
        codes, scales, numbers, 256, torch.float32
    )
    timed = {}
    for name, function in (("encode", encode), ("decode", decode)):
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - started)
        timed[name] = min(seconds[1:])
    return timed


if __name__ == "__main__":
    for row in measure(quick="--quick" in sys.argv):
        sys.stdout.write(f"{row['name']:45}{row['nanoseconds_a_value']:8.2f} ns\n")
