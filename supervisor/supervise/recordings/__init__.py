"""Metrics recorded by other programs, as series for a back-test: one reader per file here.

A reader is a module with `claims(path) -> bool` and `read(path) -> Table`, found by being here.
`aliases` maps column names to metrics, `table` turns a table into recordings.
"""
