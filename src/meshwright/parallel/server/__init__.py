"""Techniques in which single ranks keep and step the parameters that all ranks train.

parameter_server  k of the data-parallel ranks are servers too: workers push gradients, and pull parameters
"""
