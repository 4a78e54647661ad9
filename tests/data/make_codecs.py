"""Writes codecs.npz: what bitsandbytes and torchao store, for `test_codecs_oracles.py`.

Run with torch, bitsandbytes and torchao installed; no accelerator is used:

    python tests/data/make_codecs.py

Made with torch 2.13.0, bitsandbytes 0.50.2 and torchao 0.18.0 on an x86-64 CPU.
"""

import pathlib
import sys

import numpy as np

PATH = pathlib.Path(__file__).with_name("codecs.npz")
LARGEST = float(np.finfo(np.float32).max)


def inputs() -> dict[str, np.ndarray]:
    """What is stored: every case in float32."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal
    wide = np.exp(6 * normal(2048)) * np.sign(normal(2048))
    cases = {
        "random": normal(2048),
        "wide": wide,
        "zero": np.zeros(300),
        "one element": np.array([-3e-5]),
        "not a multiple": normal(1000),
        "beside zeros": np.where(rng.uniform(size=1024) < 0.1, normal(1024), 0),
        "denormal": normal(512) * 1e-39,
        "smallest denormal": normal(512) * 1e-41,
        "partly denormal": wide[:1024] * 1e-38,
        "large": normal(512) * 1e37,
        "huge": rng.uniform(-1, 1, 1024) * LARGEST,
    }
    return {name: x.astype(np.float32) for name, x in cases.items()}


def around(thresholds: np.ndarray, block: int) -> np.ndarray:
    """Numbers just below, at and just above each threshold, beside a 1 a block."""
    down, up = np.float32(-9), np.float32(9)
    near = np.stack(
        [np.nextafter(thresholds, down), thresholds, np.nextafter(thresholds, up)]
    ).reshape(-1)
    near = np.pad(near, (0, -near.size % (block - 1))).reshape(-1, block - 1)
    return np.pad(near, ((0, 0), (0, 1)), constant_values=1).reshape(-1)


def bitsandbytes_codes(
    x: np.ndarray, signed: bool, dtype: str = "float64"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and absmax of `bitsandbytes::quantize_blockwise` on the CPU.

    Its float64 kernel compares with every number of the map. From 0.50 on the float32
    kernel looks up a table of 65536 entries, and is not exact.
    """
    import torch
    from bitsandbytes.functional import create_dynamic_map

    codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(
        torch.tensor(x).to(getattr(torch, dtype)), create_dynamic_map(signed), 256
    )
    return codes.numpy(), absmax.numpy()


def bitsandbytes_map(signed: bool) -> np.ndarray:
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed).numpy()


def padded(x: np.ndarray, block: int) -> np.ndarray:
    """Filled up with zeros: torchao quantises whole blocks only."""
    return np.pad(x, (0, -x.size % block))


def torchao_int4(x: np.ndarray, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """One code a value, and scales, of torchao's 4-bit optimizer state."""
    import torch
    from torchao.optim.quant_utils import quantize_4bit_with_qmap, scale_tensor

    scaled, scales = scale_tensor(torch.tensor(padded(x, 128)), 128)
    codes = quantize_4bit_with_qmap(scaled, torch.tensor(torchao_map(signed)))
    return codes.numpy()[: x.size], scales.numpy()


def torchao_map(signed: bool) -> np.ndarray:
    from torchao.optim import subclass_4bit

    of = subclass_4bit.get_qmap_signed if signed else subclass_4bit.get_qmap_unsigned
    return np.array(of(), np.float32)


def torchao_float8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of codes, and scales, of torchao's fp8 optimizer state."""
    import torch
    from torchao.optim.subclass_fp8 import quantize_fp8

    codes, scales = quantize_fp8(torch.tensor(padded(x, 256)), 256)
    return codes.view(torch.uint8).numpy()[: x.size], scales.numpy()


def oracles(x: np.ndarray) -> dict[str, np.ndarray]:
    """Everything known of one input, by name of the codec and of the array."""
    found = {}
    for signed in (True, False):
        kind, values = ("signed", x) if signed else ("unsigned", np.abs(x))
        for codec, (codes, scales) in {
            "int8": bitsandbytes_codes(values, signed),
            "grid": bitsandbytes_codes(values, signed, "float32"),
            "int4": torchao_int4(values, signed),
        }.items():
            found[f"{codec}/{kind}/codes"] = codes
            found[f"{codec}/{kind}/scales"] = scales
    codes, scales = torchao_float8(x)
    return found | {"float8/signed/codes": codes, "float8/signed/scales": scales}


def everything() -> dict[str, np.ndarray]:
    arrays = {}
    for signed, kind in ((True, "signed"), (False, "unsigned")):
        arrays[f"map8/{kind}"] = bitsandbytes_map(signed)
        arrays[f"map4/{kind}"] = torchao_map(signed)
    cases = inputs()
    for kind in ("signed", "unsigned"):
        for bits, block in ((8, 256), (4, 128)):
            numbers = arrays[f"map{bits}/{kind}"]
            halves = (numbers[1:] + numbers[:-1]) * np.float32(0.5)
            cases[f"thresholds {bits} {kind}"] = around(halves, block)
        # Where the reciprocal of the scale is denormal, its few digits tell.
        halves = cases[f"thresholds 8 {kind}"]
        scales = np.float32([0.99, 0.71, 0.53, 0.37]) * np.float32(LARGEST)
        tiled = np.concatenate([halves * scale for scale in scales])
        cases[f"thresholds 8 {kind}, huge"] = tiled
    # Half-way between float8 numbers: eight in every power of two up to 448.
    grid = np.outer(2.0 ** np.arange(-6, 9), 1 + np.arange(8) / 8).reshape(-1)[:-1]
    cases["thresholds float8"] = around(
        ((grid[1:] + grid[:-1]) / 2 / 448).astype(np.float32), 256
    )
    for name, x in cases.items():
        arrays[f"input/{name}"] = x
        for key, array in oracles(x).items():
            arrays[f"{key}/{name}"] = array
    return arrays


if __name__ == "__main__":
    np.savez_compressed(PATH, **everything())
    sys.stdout.write(f"{PATH}: {PATH.stat().st_size} bytes\n")
