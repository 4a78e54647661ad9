"""What XLA of earlier versions of JAX gets wrong.

Each fact was checked on jax 0.10.2, where it is so, and on 0.12.0.1, where it is not.
It ends with jax 0.11.2.
"""

import jax

_BEFORE_0_11_2 = jax.__version_info__ < (0, 11, 2)

#: XLA:CPU drops optimization barriers before it fuses. The fetches of pages then fuse
#: into every one of their uses, reads and writes of a leaf overlap, and each page
#: copies the whole leaf: 9 times the time at 4 pages a leaf, 60 times at 64.
CPU_DROPS_BARRIERS = _BEFORE_0_11_2

#: XLA:GPU derives a transfer's address from the loop's own variable alone, and ignores
#: what is computed of it (openxla/xla#46308).
GPU_NEEDS_RAW_INDEX = _BEFORE_0_11_2

#: XLA:GPU copies the host arrays that a conditional returns, also those that a branch
#: hands through.
GPU_COPIES_FOR_CONDITIONALS = _BEFORE_0_11_2
