"""Results of `meshwright bench`, as text and as pages.

allreduce_cost_table         the table of all-reduce algorithms: counted at every n, timed where measured
device                       measured rates of a device beside the fitted cost model
allreduce_measured_vs_model  measured links beside the network model: a table, and a page with a plot
"""
