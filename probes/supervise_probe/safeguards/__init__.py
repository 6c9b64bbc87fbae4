"""Safeguards around each update: they change a few steps of training without a rollback."""
