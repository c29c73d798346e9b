"""Techniques in which single ranks keep and step the parameters that all ranks train.

parameter_server  k of the data-parallel ranks are servers too: workers push gradients, and pull parameters
stale_server      servers apply each worker's gradients as they arrive; nobody waits, within a bound
stale_updates     what workers send and servers apply at run time
arrival_record    the order of these updates, on file: what a replay of a run needs
"""
