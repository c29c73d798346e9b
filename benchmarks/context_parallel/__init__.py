"""Context parallelism: bytes sent, load balance, parity, memory, and speed.

attention_call     one attention call on one device and on several ranks
context_balance    load balance of attention over ranks
context_bytes      bytes that context parallelism sends, against the formulas
context_memory     longest sequence under a memory limit, on one and on four ranks
context_models     context-parallel training of whole models, for the parity benchmark
context_parity     context-parallel steps against one device, in float64
context_published  ring attention and Ulysses against public packages
context_speed      attention on several processes against one process with as many threads
"""
