"""Codecs against the libraries whose formats they are.

`data/codecs.npz` holds what bitsandbytes and torchao stored, so that every machine
compares with them; where they are installed, more inputs are compared.
"""

import dataclasses
import functools
import importlib
import pathlib
import sys
import warnings

import numpy as np
import pytest

from helpers import coding
from paged_optax.codecs import DynamicInt4, DynamicInt8, Float8E4M3
from paged_optax.codecs.dynamic_int4 import int4_map
from paged_optax.codecs.dynamic_int8 import dynamic_map

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("strict")]

DATA = pathlib.Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "codecs.npz")
CASES = [key.removeprefix("input/") for key in GOLDEN if key.startswith("input/")]


# Against bitsandbytes and torchao.


def case(name, kind):
    x = GOLDEN[f"input/{name}"]
    return x if kind == "signed" else np.abs(x)


def golden(codec, kind, name):
    return [GOLDEN[f"{codec}/{kind}/{what}/{name}"] for what in ("codes", "scales")]


@coding.SIGNED
def test_maps(signed):
    kind = "signed" if signed else "unsigned"
    np.testing.assert_array_equal(dynamic_map(signed), GOLDEN[f"map8/{kind}"])
    four_bits = int4_map(signed)
    np.testing.assert_array_equal(four_bits, GOLDEN[f"map4/{kind}"])
    assert dynamic_map(signed).dtype == four_bits.dtype == np.float32


@pytest.mark.quick("cpu-random", "cpu-thresholds 8 signed-", "cpu-denormal")
@coding.SIGNED
@pytest.mark.parametrize("name", CASES)
def test_int8_is_bitsandbytes(name, signed, platform):
    """Code for code and scale for scale, thresholds and denormals included."""
    kind = "signed" if signed else "unsigned"
    codes, scales = golden("int8", kind, name)
    stored = coding.encode(DynamicInt8(signed, rounds_to_zero=True), case(name, kind))
    np.testing.assert_array_equal(stored.codes, codes)
    coding.assert_same(stored.scales, scales)


@pytest.mark.quick("cpu-random", "cpu-thresholds 4 signed-", "cpu-denormal")
@coding.SIGNED
@pytest.mark.parametrize("name", CASES)
def test_int4_is_torchao(name, signed, platform):
    kind = "signed" if signed else "unsigned"
    codes, scales = golden("int4", kind, name)
    x = case(name, kind)
    stored = coding.encode(DynamicInt4(signed), x)
    np.testing.assert_array_equal(stored.codes, codes)
    # The one difference: a block of zeros has no scale, and decodes to zeros.
    zeros = [not block.any() for block in coding.blocks_of(x, 128)]
    coding.assert_same(stored.scales, np.where(zeros, np.float32(0), scales))
    assert np.all(scales[zeros] == np.float32(1e-12))


@pytest.mark.parametrize("name", CASES)
def test_float8_is_torchao(name):
    codes, scales = golden("float8", "signed", name)
    stored = coding.encode(Float8E4M3(), GOLDEN[f"input/{name}"])
    np.testing.assert_array_equal(np.asarray(stored.codes).view(np.uint8), codes)
    coding.assert_same(stored.scales, scales)


@pytest.mark.quick("cpu-random", "cpu-denormal", "cpu-beside zeros")
@pytest.mark.parametrize(
    "exact",
    [
        DynamicInt8(signed=False, rounds_to_zero=True),
        DynamicInt4(signed=False),
        Float8E4M3(signed=False, rounds_to_zero=True),
    ],
    ids=["int8", "int4", "float8"],
)
@pytest.mark.parametrize("name", CASES)
def test_no_second_moment_vanishes(name, exact, platform):
    """Codes are the library's, or where numbers are small the next: never zero."""
    x = case(name, "unsigned")
    codec = exact
    if not isinstance(exact, DynamicInt4):  # its map has no zero
        codec = dataclasses.replace(exact, rounds_to_zero=False)
    theirs, ours = coding.encode(exact, x), coding.encode(codec, x)
    coding.assert_same(ours.scales, theirs.scales)
    decoded = np.asarray(coding.decode(codec, ours, x.shape))
    codes = [np.asarray(stored.codes).view(np.uint8) for stored in (ours, theirs)]
    if codec is exact:
        coding.assert_same(*codes)
    else:
        vanished = (codes[1] == 0) & (x > 0)
        np.testing.assert_array_equal(codes[0][vanished], 1)
        early = ~vanished & (codes[1] <= 14) & isinstance(exact, DynamicInt8)
        same = ~vanished & ~early
        np.testing.assert_array_equal(codes[0][same], codes[1][same])
        assert set((codes[0] - codes[1])[early]) <= {0, 1}
        assert name not in ("wide", "partly denormal") or vanished.any()
    # A product with a tiny scale may be denormal, which a backend may take for zero.
    normal = np.repeat(np.asarray(ours.scales), codec.block)[: x.size] > 1e-30
    assert np.all(decoded[normal & (x.reshape(-1) > 0)] > 0)
    assert np.all(decoded[x == 0] == 0) or isinstance(codec, DynamicInt4)


@coding.SIGNED
@pytest.mark.parametrize("name", ["random", "wide", "beside zeros"])
def test_what_bitsandbytes_rounds_first(name, signed):
    """Its float32 kernel differs by a table for -1, -1 + 2/65535, ... 1 alone."""
    kind = "signed" if signed else "unsigned"
    x = case(name, kind)
    codes, scales = golden("grid", kind, name)
    rows = coding.blocks_of(x, 256)
    scaled = np.clip(rows * (np.float32(1) / scales)[:, None], -1, 1)
    half = ((scaled + np.float32(1)) * np.float32(0.5)).astype(np.float64)
    point = np.floor((half * 65535 + 0.5).astype(np.float32))
    value = (np.float32(2) * point) / np.float32(65535) - np.float32(1)
    ours = coding.encode(
        DynamicInt8(signed, rounds_to_zero=True), coding.beside_one(value.reshape(-1))
    )
    ours = np.asarray(ours.codes).reshape(-1, 256)[:, :255].reshape(-1)[: x.size]
    np.testing.assert_array_equal(ours, codes)
    exact, _ = golden("int8", kind, name)
    assert 0 < np.mean(codes != exact) < 1


@functools.cache
def maker():
    """`data/make_codecs.py`, where the libraries it asks are installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in ("torch", "bitsandbytes", "torchao.optim"):
            why = f"{library} is not installed: pip install '.[oracle]'"
            pytest.importorskip(library, reason=why)
    spec = importlib.util.spec_from_file_location("make", DATA / "make_codecs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make"] = module
    spec.loader.exec_module(module)
    return module


def test_golden_data_is_what_the_libraries_say():
    made = maker().everything()
    assert made.keys() == set(GOLDEN)
    for key, array in made.items():
        if not key.startswith("grid"):  # a table of one version of bitsandbytes
            coding.assert_same(array, GOLDEN[key])


@coding.SIGNED
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 255, 257, 100_000])
def test_installed_libraries(size, seed, signed):
    make = maker()
    x = coding.sample(size, seed, positive=not signed)
    stored = coding.encode(DynamicInt8(signed, rounds_to_zero=True), x)
    codes, absmax = make.bitsandbytes_codes(x, signed)
    np.testing.assert_array_equal(stored.codes, codes)
    coding.assert_same(stored.scales, absmax)
    stored = coding.encode(DynamicInt4(signed), x)
    codes, scales = make.torchao_int4(x, signed)
    np.testing.assert_array_equal(stored.codes, codes)
    coding.assert_same(stored.scales, scales)
    stored = coding.encode(Float8E4M3(), x)
    codes, scales = make.torchao_float8(x)
    np.testing.assert_array_equal(np.asarray(stored.codes).view(np.uint8), codes)
    coding.assert_same(stored.scales, scales)
