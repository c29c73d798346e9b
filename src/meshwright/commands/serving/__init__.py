"""`serve` and `board`: a model answers over HTTP, and runs are shown on a page.

serve           starts the local ranks, or serves as one
served_source   what SOURCE names: a plan and the weights
board           the pages of runs, and prompts for the model that is served
run_status      what a run does: trains, waits, has failed
"""
