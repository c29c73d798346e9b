"""The interface of collectives, their validation, their ledger and their differentiable form.

group                  Group, World, Work: the collectives over the ranks of some mesh axes
ledger                 the collectives that a rank issued, and the bytes that it sent
collective_call        validates a collective and records it before it is issued
comm_volume            the bytes that leave a rank in a collective
redistribute           moves a tensor between placements, differentiable
coded_redistribution   the same, as codes
route                  moves rows between ranks by a table made at run time, differentiable
flight_recorder        ring buffer of the last collectives of a rank
deterministic_sum      sums with a fixed order of summands
"""
