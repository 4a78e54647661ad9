"""One layer's gradients at a time.

.. include:: layerwise.md
"""
