"""Guides, one a page. The README comes before them.

| guide | what it is about |
| --- | --- |
| `paged_optax.guides.start` | install, train, Flax and others, `jax.jit` |
| `paged_optax.guides.what_fits` | what a card holds: bytes and seconds of each way |
| `paged_optax.guides.layerwise` | one layer's gradients at a time |
| `paged_optax.guides.many_devices` | meshes, processes, shardings |
| `paged_optax.guides.save_and_restore` | checkpoints, skipped steps, one parameter |
| `paged_optax.guides.codecs` | moments in fewer bits: losses and updates |
| `paged_optax.guides.how_it_works` | pages, their size, shapes, when paging loses |
| `paged_optax.guides.comparison` | other libraries that offload |
| `paged_optax.guides.troubleshooting` | messages that are met first |
| `paged_optax.guides.wrong_calls` | wrong calls, and what they get |
| `paged_optax.guides.security` | what is trusted |
"""
