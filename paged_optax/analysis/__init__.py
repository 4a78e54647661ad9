"""Analysis of a transformation's jaxpr.

`flat` traces it and numbers its values, `per_leaf` extracts one program a leaf, and
`program` runs it on a leaf or on a page.
"""
