"""Moments in fewer bits: losses and updates.

.. include:: codecs.md
"""
