"""Whole runs: data, model, objective and loop, with a folder that holds everything about them."""
