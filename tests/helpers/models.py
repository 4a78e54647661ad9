"""Every distinct parameter shape of ten models, as their JAX versions lay them out.

Sizes are those of the models' published configurations. Attention kernels have an axis
of heads where the version named has one, convolutions are HWIO, embeddings are
`[vocabulary, features]`, and an output matrix that is not tied is the other way round.
"""

import itertools
import math
from collections.abc import Iterator

Shape = tuple[int, ...]


def shapes(text: str) -> list[Shape]:
    """Shapes as text, such as `7x7 64`."""
    return [tuple(map(int, shape.split("x"))) for shape in text.split()]


def attention(features: int, heads: int, size: int) -> list[Shape]:
    """`flax.linen.MultiHeadDotProductAttention`."""
    return [(features, heads, size), (heads, size, features), (heads, size)]


def dense(*sizes: int) -> list[Shape]:
    """Layers of these sizes, with biases."""
    return [*itertools.pairwise(sizes), *[(n,) for n in sizes[1:]]]


def decoder(v: int, d: int, heads: int, kv: int, inner: int, moe: str = "") -> str:
    """A gated decoder as MaxText lays it out, heads of 128, its output untied."""
    inside = f"{moe}{d}x{inner} {moe}{inner}x{d}"
    inside += f" {d}x{moe.strip('x')}" if moe else ""
    attended = f"{d}x{heads}x128 {d}x{kv}x128 {heads}x128x{d}"
    return f"{v}x{d} {d}x{v} {attended} {inside} {d} 128"


def convnext(depths: tuple[int, ...]) -> list[Shape]:
    """ConvNeXt: depthwise 7x7, a hidden layer of four times the width."""
    blocks = [x for n in depths for x in [(7, 7, 1, n), *dense(n, 4 * n, n), (n,)]]
    between = [(2, 2, a, b) for a, b in itertools.pairwise(depths)]
    return [(4, 4, 3, depths[0]), *blocks, *between, *dense(depths[-1], 1000)]


def sdxl(
    widths: tuple[int, ...] = (320, 640, 1280), context: int = 2048
) -> list[Shape]:
    """Stable Diffusion XL's U-Net as Diffusers lays it out for Flax."""
    found: list[Shape] = [(3, 3, 4, widths[0]), (3, 3, widths[0], 4)]
    found += dense(widths[0], 4 * widths[0], 4 * widths[0])
    found += dense(2816, 4 * widths[0])
    joined = list(itertools.product(widths, widths))
    for a, b in [*joined, *shapes("1920x640 1920x1280 2560x1280 960x320 960x640")]:
        found += [(3, 3, a, b), (1, 1, a, b), (4 * widths[0], b)]
    for n in widths[1:]:
        found += [(n, n), (context, n), (n, 8 * n), (4 * n, n), (n,), (8 * n,)]
    return found


MODELS: dict[str, list[Shape]] = {
    "GPT-2": shapes("50257x768 768x50257 1024x768")
    + [*dense(768, 2304), *dense(768, 768), *dense(768, 3072, 768)],
    "Whisper large": shapes("51865x1280 1280x51865 448x1280 1500x1280 3x80x1280")
    + [(3, 1280, 1280), *attention(1280, 20, 64), *dense(1280, 5120, 1280)],
    # As the `gemma` library lays it out.
    "Gemma 3 4B": shapes(
        "262144x2560 8x2560x256 2x4x2560x256 8x256x2560 2x10240x2560 10240x2560"
        " 2560 256"
    ),
    "Qwen3 4B": shapes(decoder(151936, 2560, 32, 8, 9728)),
    "Llama 3 8B": shapes(decoder(128256, 4096, 32, 8, 14336)),
    "Mixtral 8x7B": shapes(decoder(32000, 4096, 32, 8, 14336, "8x")),
    "T5 large": shapes("32128x1024 1024x32128 32x16 1024x16x64 1024x1024")
    + [*dense(1024, 4096, 1024), *dense(1024, 2816, 1024)],
    "ViT large": shapes("16x16x3x1024 1x197x1024")
    + [*attention(1024, 16, 64), *dense(1024, 4096, 1024), *dense(1024, 1000)],
    "ConvNeXt base": convnext((128, 256, 512, 1024)),
    "SDXL U-Net": sdxl(),
}

#: Shapes of other models that a compiler once refused, or copied whole.
ODD = shapes(
    "2048x32x64 24x1024x64 32x4096x16 3x3x512x512 32x128x4096 4x4096x4096 4x4x1024x96"
    " 8x3x1111x77 7x7x3x64 6400x5001 128x200003 12288x4097 256000x3584 4096x32001"
    " 4096x11008 3x768x50257 3072x5120 7x1000003 49152x16384 70000x32768 300000x8192"
)


def distinct(smallest: int = 0) -> Iterator[Shape]:
    """The shapes of all models, each once, of at least so many values."""
    every = dict.fromkeys(shape for shapes in MODELS.values() for shape in shapes)
    return (shape for shape in every if math.prod(shape) >= smallest)
