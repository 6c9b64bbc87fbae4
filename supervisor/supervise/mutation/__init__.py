"""Policies with one thing wrong, played until a scenario notices."""
