"""The page loop, independent of Optax.

`stream` updates leaves of one shape, and `fill` makes a new leaf. `sharing` cuts leaves
into pages and groups the leaves that share them, by the rules of `page_cuts`; `pages`
has page sizes and addresses. `loop` reads, decodes, computes, encodes and writes each
page, and `exchange` isolates leaves and overlaps the two directions of the link.
`paged_array` encodes and decodes a page, `buffers` slices one array of it, and
`transfers` moves slices between host and device. `shards` divides leaves over a mesh.
`backend_check` verifies a backend once.
"""
