"""Messages that are met first.

.. include:: troubleshooting.md
"""
