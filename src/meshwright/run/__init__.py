"""The job around the step: the data and its order, checkpoints, and what a run reports. Knows no technique."""
