"""Tables of embeddings whose rows lie on ranks of their own.

embedding_host  workers pull the rows that a microbatch looks up, and push the gradients of these
row_actions     the actions of workers, and the lists of hosts
row_exchange    what workers and hosts send each other at run time
"""
