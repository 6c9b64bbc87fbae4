"""Proving a policy before it is trusted: scenarios, mutants, back-tests on what was recorded."""
