"""Collectives over mesh axes, and the moves between layouts."""
