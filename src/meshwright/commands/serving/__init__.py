"""`serve`: a model answers over HTTP.

serve           starts the local ranks, or serves as one
served_source   what SOURCE names: a plan and the weights
"""
