"""What is trusted.

.. include:: security.md
"""
