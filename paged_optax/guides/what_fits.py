"""What a card holds: bytes and seconds by way to train.

.. include:: what_fits.md
"""
