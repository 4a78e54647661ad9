"""`test_clients.py` imports these: the packages of some may not be installed."""

collect_ignore_glob = ["[a-z]*_[a-z]*.py"]
