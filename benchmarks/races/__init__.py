"""Looks for races between streams, on fake CUDA tensors.

vector_clocks       orders the work of the host and of streams
memory_accesses     the accesses of a piece of memory, and the races among them
fake_streams        streams and events of the device that does nothing
race_checker        notes every operation while it is active, and collects the races
fake_process_group  collectives on streams of their own, which move nothing
rank_in_streams     runs one rank of a plan under the checker
planted_races       changes of the engine that make a race
races               all planted races are found, and random plans have none
"""
