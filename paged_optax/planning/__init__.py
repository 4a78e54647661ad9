"""What lives where and what fits, known before anything is allocated.

`page_plan` is one transformation's plan. `fits` compares `ways` to train a model as the
tables of `footprints`. `layers` are a model's, with the activations of a batch.
`card_rates` has accelerators by name, and the seconds of a step on them. Shapes of
parameters are those of `models` by name or by a function, of a `checkpoint`, or of
`hugging_face`'s files.
"""
