"""Checkpoints, skipped steps, one parameter's state.

.. include:: save_and_restore.md
"""
