"""Canary gate of a candidate against a baseline: two arms of short runs, and one verdict.

`arms` is what is compared, `effect` how much the loss differs and how sure that is, `guards` what
must not get worse whatever the loss does, `invariants` what makes the arms comparable at all,
`judgement` puts them together. Nothing here reads a file or a clock.
"""
