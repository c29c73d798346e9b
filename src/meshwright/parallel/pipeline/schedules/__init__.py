"""Pipeline schedules: who runs which stage for which microbatch, and in which order.

schedule                Schedule, its checks, its simulation, and its drawing
registry                the schedules by name
gpipe                   GPipe: all forwards, then all backwards
naive_model_parallel    one microbatch at a time, without pipelining
one_f_one_b             1F1B (PipeDream-flush)
interleaved             interleaved 1F1B
zero_bubble             ZB-H1, ZB-H2, ZB-2p
zb_v                    ZB-V, V-Half, V-Min
dualpipe                DualPipe and DualPipeV
list_scheduler          list scheduling, and filling bubbles with W
automatic               automatic: the schedule with the least bubble within a memory limit
custom                  schedules from a CSV file or a Python function
"""
