"""Runs that others published, as input of the planner.

layouts   mesh, strategies and habits of the code base of a row
machines  device, host and network of a row
memory    what each code base keeps in memory
rows      reads data/published_runs.csv: a row becomes a shape, a layout and a machine
scores    predicted against measured step times, source by source
times     seconds of a step, from what a row states
"""
