"""Pipelines: the layers of a model on several ranks, and the orders in which those work. One file per schedule."""
