"""Tables, figures and pages about plans, searches, benchmarks and runs.

table       a table as a value, shown in the terminal or on a page
terminal    tables of a plan, its parameters, its prediction, and of a run's progress
search      what a search found: tables, text, and a page
timeline    timelines and Gantt charts of a step, from a program or a trace
html        the page on a run
bench       tables and pages on measured devices and networks
"""
