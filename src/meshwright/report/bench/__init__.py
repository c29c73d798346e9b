"""Results of `meshwright bench`, as text and as pages.

allreduce_formulas    the table of all-reduce algorithms: counted at every n, timed where measured
device                measured rates of a device beside the fitted cost model
network               measured links beside the network model: a table, and a page with a plot
"""
