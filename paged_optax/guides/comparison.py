"""Other libraries that offload.

.. include:: comparison.md
"""
