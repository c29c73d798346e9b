"""Published training runs, as input of the planner.

experts   models with experts: sizes and layouts that rows leave out
layouts   mesh and strategies of a row, with the defaults of its code base
machines  device, host and network of a row
memory    framework memory of each code base
rows      reads data/published_runs.csv: a row becomes a model shape, a layout and a machine
scores    predicted against measured step times, by source
times     seconds of a step, from the columns of a row
"""
