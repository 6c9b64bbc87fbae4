"""Metrics that others recorded, as series for a back-test: one reader per file of this folder.

A reader is a module with `claims(path) -> bool` and `read(path) -> Sheet`; it is found by being
here. `aliases` says what the columns of others mean, `sheet` makes recordings of a table.
"""
