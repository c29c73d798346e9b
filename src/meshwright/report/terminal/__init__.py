"""Tables and text for the terminal.

plan_overview                  a plan on one screen: mesh, data, memory, bytes sent, predicted step
action_table                   a plan in full, with all its actions
coded_messages                 what is sent as codes, where, and its bytes
fold_repeated_lines            lines that repeat with other numbers as loops
verdict_table                  the verdict of a verification as a table of errors, or of what was sent
dtype_balance_staleness_notes  the dtype of each role, the sharding of sequences, and the staleness of weights
memory_and_sent_bytes          state bytes by category, and bytes sent per step by kind of action
data_line                      the data of a run in one line, and a warning about repeated samples
params_table                   every parameter: its role, its sharding, and its bytes on a rank
prediction                     the predicted seconds, memory and bytes sent of a plan
explain_model                  the blocks, layer roles and tied parameters of a model
progress                       the steps of a run: a live table and a bar on a terminal, plain lines elsewhere
"""
