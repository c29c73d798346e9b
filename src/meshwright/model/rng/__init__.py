"""Random numbers of the forward (dropout, stochastic depth) that do not depend on the parallel plan.

stateless_rng      draw sites of the forward, and the stateless generator that draws at them
stateless_dropout  function mode in which torch's random functions draw from that generator
compiled_draws     the draws of a compiled graph: its masks are inputs
draw_ops           operators that draw a mask of all samples in one call
triton_draws       the same as kernels of Triton
sharded_draws      the part of a draw that a rank with a slice of the tensor makes
"""
