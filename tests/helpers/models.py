"""Every distinct parameter shape of ten models, as their JAX versions lay them out.

Sizes are those of the models' published configurations. Attention kernels have an axis
of heads where the version named has one, convolutions are HWIO, embeddings are
`[vocabulary, features]`, and an output matrix that is not tied is the other way round.
"""

import math
from collections.abc import Iterator

Shape = tuple[int, ...]


def attention(features: int, heads: int, size: int) -> list[Shape]:
    """`flax.linen.MultiHeadDotProductAttention`."""
    return [(features, heads, size), (heads, size, features), (heads, size)]


def dense(*sizes: int) -> list[Shape]:
    """Layers of these sizes, with biases."""
    kernels = list(zip(sizes[:-1], sizes[1:], strict=True))
    return [*kernels, *[(n,) for n in sizes[1:]]]


def decoder(
    vocabulary: int,
    features: int,
    heads: int,
    kv_heads: int,
    size: int,
    hidden: int,
    experts: int = 0,
) -> list[Shape]:
    """A gated decoder as MaxText lays it out, its output matrix untied."""
    inside = [(features, hidden), (hidden, features)]
    if experts:
        inside = [(experts, *shape) for shape in inside] + [(features, experts)]
    return [
        (vocabulary, features),
        (features, vocabulary),
        (features, heads, size),
        (features, kv_heads, size),
        (heads, size, features),
        *inside,
        (features,),
        (size,),
    ]


def gemma3(
    vocabulary: int, features: int, heads: int, kv_heads: int, size: int, hidden: int
) -> list[Shape]:
    """Gemma 3 as the `gemma` library lays it out."""
    return [
        (vocabulary, features),
        (heads, features, size),
        (2, kv_heads, features, size),
        (heads, size, features),
        (2, hidden, features),
        (hidden, features),
        (features,),
        (size,),
    ]


def convnext(depths: tuple[int, ...]) -> list[Shape]:
    """ConvNeXt: depthwise 7x7, a hidden layer of four times the width."""
    blocks = [
        shape for n in depths for shape in [(7, 7, 1, n), *dense(n, 4 * n, n), (n,)]
    ]
    between = [(2, 2, a, b) for a, b in zip(depths[:-1], depths[1:], strict=True)]
    return [(4, 4, 3, depths[0]), *blocks, *between, *dense(depths[-1], 1000)]


def sdxl(
    widths: tuple[int, ...] = (320, 640, 1280), context: int = 2048
) -> list[Shape]:
    """Stable Diffusion XL's U-Net as Diffusers lays it out for Flax."""
    found: list[Shape] = [(3, 3, 4, widths[0]), (3, 3, widths[0], 4)]
    found += dense(widths[0], 4 * widths[0], 4 * widths[0])
    found += dense(2816, 4 * widths[0])
    joined = [(a, b) for a in widths for b in widths]
    for a, b in [
        *joined,
        (1920, 640),
        (1920, 1280),
        (2560, 1280),
        (960, 320),
        (960, 640),
    ]:
        found += [(3, 3, a, b), (1, 1, a, b), (4 * widths[0], b)]
    for n in widths[1:]:
        found += [(n, n), (context, n), (n, 8 * n), (4 * n, n), (n,), (8 * n,)]
    return found


MODELS: dict[str, list[Shape]] = {
    "GPT-2": [
        (50257, 768),
        (768, 50257),
        (1024, 768),
        *dense(768, 2304),
        *dense(768, 768),
        *dense(768, 3072, 768),
    ],
    "Whisper large": [
        (51865, 1280),
        (1280, 51865),
        (448, 1280),
        (1500, 1280),
        (3, 80, 1280),
        (3, 1280, 1280),
        *attention(1280, 20, 64),
        *dense(1280, 5120, 1280),
    ],
    "Gemma 3 4B": gemma3(262144, 2560, 8, 4, 256, 10240),
    "Qwen3 4B": decoder(151936, 2560, 32, 8, 128, 9728),
    "Llama 3 8B": decoder(128256, 4096, 32, 8, 128, 14336),
    "Mixtral 8x7B": decoder(32000, 4096, 32, 8, 128, 14336, experts=8),
    "T5 large": [
        (32128, 1024),
        (1024, 32128),
        (32, 16),
        (1024, 16, 64),
        (1024, 1024),
        *dense(1024, 4096, 1024),
        *dense(1024, 2816, 1024),
    ],
    "ViT large": [
        (16, 16, 3, 1024),
        (1, 197, 1024),
        *attention(1024, 16, 64),
        *dense(1024, 4096, 1024),
        *dense(1024, 1000),
    ],
    "ConvNeXt base": convnext((128, 256, 512, 1024)),
    "SDXL U-Net": sdxl(),
}

#: Shapes of other models that a compiler once refused, or copied whole.
ODD: list[Shape] = [
    (2048, 32, 64),
    (24, 1024, 64),
    (32, 4096, 16),
    (3, 3, 512, 512),
    (32, 128, 4096),
    (4, 4096, 4096),
    (4, 4, 1024, 96),
    (8, 3, 1111, 77),
    (7, 7, 3, 64),
    (6400, 5001),
    (128, 200003),
    (12288, 4097),
    (256000, 3584),
    (4096, 32001),
    (4096, 11008),
    (3, 768, 50257),
    (3072, 5120),
    (7, 1000003),
    (49152, 16384),
    (70000, 32768),
    (300000, 8192),
]


def distinct(smallest: int = 0) -> Iterator[Shape]:
    """The shapes of all models, each once, of at least so many values."""
    every = dict.fromkeys(shape for shapes in MODELS.values() for shape in shapes)
    return (shape for shape in every if math.prod(shape) >= smallest)
