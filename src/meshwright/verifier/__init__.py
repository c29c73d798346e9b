"""Proves a plan: on paper (static), and by running it beside one device (parity)."""
