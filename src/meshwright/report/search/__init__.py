"""Results of `meshwright search`, as text and as pages.

search_result    the scenario, the ranking, and why the first configuration wins
search_page      an HTML page of step time against memory
max_fit          the largest model or batch that fits, and what stops one more
"""
