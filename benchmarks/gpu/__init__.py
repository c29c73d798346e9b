"""What only a GPU can tell, in one command of nine minutes: `make gpu`. Each section is a process.

sections              runs all sections within their limits and writes what each found
setting               where a section runs, and how it times and compares
llamas                the models of the sections, and their trainers
device_trace          launches, waits of the host, and idle time of a step, from torch.profiler
environment           the machine, and the tests that need a GPU
parity_on_one_gpu     ranks as threads on one GPU against one device; random plans against the CPU
delayed_collectives   races: collectives that begin and end late must change no bit
step_speed            a step against plain and compiled PyTorch, and with dropout against without
attention_speed       attention kernels, forward and backward, and the merge of the ring
memory_peak           the peak of the allocator against the plan; offload: bits, seconds and peak
checkpoint_io         save and restore, and copies from pinned and pageable memory
failing_rank          how long a failed rank takes to end, and whether it says why
"""
