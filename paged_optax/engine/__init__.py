"""Pages of leaves through the device.

`page_size` decides a page's size, `page_shapes` how a GPU and a TPU cut a leaf,
`geometry` which leaves share pages; `pages` tells where each page is. `stream` is what
is called, once for like leaves. `loop` goes over their pages: it reads, decodes,
computes, encodes and writes; `transfer_order` isolates leaves, and reads one page while
another is written. `page_io` reads a page of an array and writes it back,
`paged_array` knows where it lies and what a codec makes of it. `transfers` moves both
a page of a leaf and a layer of a stack, in a TPU's layout and in a GPU's pieces.
`shards` divides leaves over a mesh; what the parameters' division is,
`paged_optax.transform.parameter_shardings` finds out. `backend_check` checks the
backend once. Nothing here knows of Optax.
"""
