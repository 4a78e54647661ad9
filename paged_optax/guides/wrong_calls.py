"""Every wrong call and its error.

.. include:: wrong_calls.md
"""
