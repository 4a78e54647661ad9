"""Memory planning without allocating.

`page_plan` plans one transformation. `what_fits` compares the `ways` to train a model
as the tables of `footprints`, with the `activations` of a batch and seconds on `cards`.
Shapes come from `models` by name, a `checkpoint`, or `hugging_face`'s files.
"""
