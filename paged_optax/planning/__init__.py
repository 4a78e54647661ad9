"""What lives where and what fits, known before anything is allocated.

`page_plan` is one transformation's plan. `fits` compares `ways` to train a model as the
tables of `footprints`: `activations` of a batch, `layers` of a model, `seconds` of a
step and of its transfers. `shapes` are those of models, `cards` are accelerators by
name.
"""
