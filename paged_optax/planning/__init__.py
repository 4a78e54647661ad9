"""What lives where and what fits, known before anything is allocated.

`page_plan` is one transformation's plan, `fits` compares ways to train a model as the
tables of `footprints`, `shapes` are those of models, `free_paging` says when transfers
take no time.
"""
