"""Pages, page size and budget, shapes, when paging loses.

.. include:: how_it_works.md
"""
