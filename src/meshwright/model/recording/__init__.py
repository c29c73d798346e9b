"""One recording of a forward, which every analysis reads.

forward_recording    what a recording holds: operations, torch calls, module calls, block calls, tensors
record_forward       records a forward, with one function mode and one dispatch mode
recording_json       saves a recording, and loads it, without pickle
model_operations     the torch calls of the model's code, by which runs and block calls are compared
parameter_dtype      which tensors have the dtype of the parameters, whatever that is
plain_lookups        which embeddings are more than a lookup of rows of their weight
plain_products       which linear layers have weights that nothing but their own calls reads
expert_choices       which experts tokens choose in a forward, and which token chooses others
router_replay        a forward takes the experts that were recorded in another one
op_table             what kind each torch operation is, and how dims map: every analysis asks this table
"""
