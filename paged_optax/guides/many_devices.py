"""Meshes, processes, shardings.

.. include:: many_devices.md
"""
