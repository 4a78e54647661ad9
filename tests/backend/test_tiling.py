"""The layouts that the engine reckons with are those of XLA:TPU."""

import math
import random
import re

import jax
import jax.numpy as jnp
import pytest

from helpers import aot, models
from paged_optax.backend import tiling
from paged_optax.codecs import arranged, named
from paged_optax.engine.sharing import MomentFormat, cut

EXTENTS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 31, 32, 33, 64, 77, 96, 127, 128, 129]
EXTENTS += [192, 256, 257, 384, 512, 768, 1000, 1024, 1111, 2048, 4096, 4097]


def layouts(shapes, dtype):
    """The axes of arrays of these shapes, minor to major, in a program for a v5e."""

    def build(mesh):
        _, host = aot.placements(mesh)
        arguments = [jax.ShapeDtypeStruct(s, dtype, sharding=host) for s in shapes]
        return jax.jit(lambda *x: x, out_shardings=(host,) * len(shapes)), arguments

    entry = re.search(r"entry_computation_layout=\{\((.*?)\)->", aot.v5e(build).hlo)
    assert entry is not None
    found = re.findall(r"\w+\[[\d,]*\]\{([\d,]*)", entry[1])
    return [tuple(map(int, axes.split(","))) for axes in found]


@pytest.mark.quick("float32")
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint32])
def test_layouts(dtype):
    """Those of the models, and of three hundred random shapes."""
    choose = random.Random(0)
    shapes = [
        tuple(choose.choices(EXTENTS, k=choose.choice([2, 2, 3, 4])))
        for _ in range(300)
    ]
    shapes = [s for s in shapes if 64 < math.prod(s) < 2**28] + list(models.distinct())
    itemsize = jnp.dtype(dtype).itemsize
    wanted = [tiling.minor_to_major(shape, itemsize) for shape in shapes]
    assert layouts(shapes, dtype) == wanted


@pytest.mark.quick("float32")
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8])
def test_bytes(dtype):
    """With what tiles leave empty, alone and in the shapes above."""
    choose = random.Random(1)
    shapes = [tuple(choose.choices(EXTENTS, k=n)) for n in (1, 1, 2, 2, 3, 4)]
    shapes += [(100,), (1025,), (5000,), (8192, 33), (3, 3, 3, 64, 64)]
    for shape in shapes:

        def build(mesh, shape=shape):
            _, host = aot.placements(mesh)
            argument = jax.ShapeDtypeStruct(shape, dtype, sharding=host)
            return jax.jit(lambda x: x, out_shardings=host), (argument,)

        wanted = aot.v5e(build).host_arguments
        assert tiling.tiled_bytes(shape, jnp.dtype(dtype).itemsize) == wanted, shape


@pytest.mark.parametrize("codec", [None, "dynamic_int8", "dynamic_int4", "float8_e4m3"])
@pytest.mark.parametrize("page_size", [2**20, 2**24])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_pages_cover_each_leaf_once(codec, page_size, platform):
    """Whatever the shape: every value is in one page."""
    for shape in [*models.distinct(), *models.ODD]:
        stored = codec and arranged(named(codec, True), shape)
        pages = cut(
            shape, (MomentFormat(4, stored), MomentFormat(4, stored)), page_size
        ).on(platform)
        full, left = divmod(pages.axis_size, pages.size)
        others = math.prod(pages.page(1))
        assert others * (full * pages.size + left) == math.prod(shape), shape
        assert pages.count == full + bool(left), shape
        assert pages.size % pages.unit == 0 or pages.count == 1, shape


def test_every_leaf_of_the_models_is_paged():
    """No codec keeps one whole on a TPU."""
    for name in (None, "dynamic_int8", "dynamic_int4", "float8_e4m3"):
        for shape in models.distinct(4096):
            codec = name and arranged(named(name, True), shape)
            for page_size in (2**20, 2**24):
                assert not cut(shape, (MomentFormat(4, codec),), page_size).tpu.refused
