"""Metrics recorded by other programs, as series for a back-test."""
