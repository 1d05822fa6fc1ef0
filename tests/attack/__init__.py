"""Attacks with real processes, files and signals; `table.py` is the list of inputs that must be refused."""
