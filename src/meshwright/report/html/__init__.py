"""The report of one run, or of several, as one HTML file that needs no network.

run_page                 the page and its sections
run_summary              the numbers that sum up a run, and tables that compare several
page_elements            parts of a page: the document, sections, notes, figures
expert_load_section      load of each expert, dropped choices, the busiest rank
board_page               pages that show runs while they train
charts                   Plotly figures: curves, the timeline of a step, time and memory
predicted_vs_measured    predicted seconds and bytes of a run beside the measured ones
"""
