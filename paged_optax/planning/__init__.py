"""What lives where and what fits, known before anything is allocated.

`page_plan` is one transformation's plan, `fits` compares the `ways` to train a model as
the tables of `footprints`, with the `activations` of a batch, the `seconds` of a step, and
the `code` of each. `shapes` are those of models, `cards` those of accelerators.
`free_paging` says when transfers take no time.
"""
