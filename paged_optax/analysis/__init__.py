"""A transformation's jaxpr, taken apart.

`flat` traces it and numbers its values, `split` finds the parts that one leaf needs,
`program` runs them on a leaf or on a page of it.
"""
