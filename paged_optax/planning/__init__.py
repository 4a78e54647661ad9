"""What lives where and what fits, known before anything is allocated.

`page_plan` is one transformation's plan. `fits` compares `ways` to train a model as the
tables of `footprints`: `activations` of a batch, `seconds` of a step, and the `code`.
`shapes` are those of models, `cards` are accelerators by name, and `free_paging` says
when transfers take no time.
"""
