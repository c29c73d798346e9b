"""Timelines of steps and schedules, planned and measured.

run_folder_reader          the files in the folder of a run, read for its report
planned_vs_measured_spans  one step as bars on streams, planned and measured
stage_actions              the rank, stage and time of every forward and backward of a microbatch
pipeline_stages            a model in stages: their blocks, what crosses each boundary, and their schedule
gantt_text                 a schedule drawn as text, with the memory of each rank
gantt_svg                  a schedule drawn as SVG, with the memory of each rank
planned_vs_measured_bytes  memory and bytes sent of a run, planned and measured
"""
