"""Pages of leaves through the device.

`page_size` decides a page's size, and which leaves share pages; `page_shapes` how a
GPU and a TPU cut a leaf; `pages` has the types. `stream` is what is called, once for
like leaves. `run` loops over their pages (`page_loops`), computes them, and orders
reads and writes; `exchange` does both at once. `transfer` reads a page and writes it
back, `streamed` knows where it lies. `shards` divides leaves over a mesh; what the
parameters' division is, `paged_optax.transform.parameter_shardings` finds out.
`backend_check` checks the backend once. Nothing here knows of Optax.
"""
