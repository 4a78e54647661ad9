"""Training scripts as users of other libraries write them, with any AdamW.

Each `train(adamw, folder)` gets `optax.adamw`, or what takes its place, and a folder to
save in. It returns the losses, the parameters and the optimizer's state at the end.
What `optax.adamw` alone would not need is marked by `# paged_optax`.
"""

import jax
import jax.numpy as jnp

SIDE = 256
X = jax.random.normal(jax.random.key(1), (32, SIDE))
Y = jnp.flip(X, 1)
