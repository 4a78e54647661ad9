"""Install, train, Flax and others, a `jax.jit` of your own.

.. include:: start.md
"""
