"""Pages of leaves through the device.

`geometry` decides a page's size, by `rows` or by `tiles`, and which leaves share
pages; `pages` has the types. `stream` is what is called, once for like leaves. `run`
loops over their pages, computes them, and orders reads and writes; `exchange` does both
at once.
`part` and `streamed` know where a page lies in its arrays, read it, and write it back.
`shards` divides leaves over a mesh. `guard` checks the backend. Nothing here knows of
Optax.
"""
