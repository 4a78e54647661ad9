"""Pages of one leaf through the device.

`geometry` decides a page's size. `stream` reads, computes and writes it back. `part`
and `streamed` say where it lies, `shards` divides the leaf over a mesh, `guard` checks
the backend. Nothing here knows of Optax.
"""
