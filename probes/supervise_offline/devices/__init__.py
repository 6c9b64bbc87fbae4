"""Multiplies matrices whose product is known, on each device that the job sees."""
