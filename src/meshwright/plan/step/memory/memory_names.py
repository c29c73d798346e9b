"""The names of the memory that actions allocate and free: outputs, gradients, saved activations, scratch."""

from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.step.program import Action

SCRATCH = "scratch"  # temporary memory of LOSS and of each B
_SUM = "summed gradient"
VALUES_NOT_ZERO = "values not zero"  # of results of ReLU that `gist` encodes
_ACTIVATION_BUFFER = "host activation buffer"
_CODED_SUM = "codes of the sum"
_NEW_STATES = "new states of the sum"
EXPERTS_SCRATCH = "experts scratch"  # that part of it which the choice of experts decides


def sum_name(param_group: ParamGroup) -> str:
    """Returns the name of the memory of this rank's shard of the summed gradients of `param_group`."""
    return f"{_SUM}({param_group.name})"


def allocates_sum(action: Action) -> bool:
    """Returns whether `action` allocates the memory of a shard of summed gradients."""
    return any(each.name.startswith(_SUM) for each in action.allocations)


def grad_name(param_group: ParamGroup) -> str:
    """Returns the name of the memory of the gradients of `param_group`."""
    return f"gradient({param_group.name})"


def output_grad_name(name: str) -> str:
    """Returns the name under which the gradient of a model output is sent."""
    return f"gradient({name})"


def output_name(block_call: str, microbatch: int) -> str:
    """Returns the name of the output of a block call, held from its F to its B."""
    return f"output({block_call}, {microbatch})"


def loss_grad_name(block_call: str, microbatch: int) -> str:
    """Returns the name of the gradient that LOSS returns for the last block call, held until its B."""
    return f"output gradient({block_call}, {microbatch})"


def deferred_grad_name(block_call: str, microbatch: int) -> str:
    """Returns the name of the output gradients that W of a block call needs, held from I to W."""
    return f"deferred gradient({block_call}, {microbatch})"


def saved_activations_name(block_call: str, microbatch: int | None) -> str:
    """Returns the name of the saved activations of a block call, held until its backward."""
    return f"saved activations({block_call}, {microbatch})"


def kept_saved_name(block_call: str, microbatch: int | None) -> str:
    """Returns the name of the outputs of operations that a checkpointed block call keeps, and that autograd
    saves when it runs again, held until its backward.
    """
    return f"kept outputs({block_call}, {microbatch})"


def kept_op_name(op: str, block_call: str, microbatch: int | None) -> str:
    """Returns the name of the other outputs of the operations `op` that a checkpointed block call keeps, held
    until it runs again.
    """
    return f"kept {op} outputs({block_call}, {microbatch})"


def saved_pairs_name(block_call: str, number: int, microbatch: int | None) -> str:
    """Returns the name of what a call of experts saves of pairs of a token and an expert."""
    return f"saved pairs({block_call}, {number}, {microbatch})"


def saved_rows_name(block_call: str, number: int, microbatch: int | None) -> str:
    """Returns the name of the rows that a call of experts keeps to compute on them once more."""
    return f"saved rows({block_call}, {number}, {microbatch})"


def saved_sums_name(block_call: str, number: int, microbatch: int | None) -> str:
    """Returns the name of the sums over experts that a call of experts saves."""
    return f"saved sums({block_call}, {number}, {microbatch})"


def rows_name(module: str, microbatch: int | None) -> str:
    """Returns the name of the rows of the table of `module` that a worker has pulled."""
    return f"rows({module}, {microbatch})"


def row_grads_name(module: str, microbatch: int | None) -> str:
    """Returns the name of the gradients of these rows, held until they have left."""
    return f"row gradients({module}, {microbatch})"


def row_sum_name(param: str) -> str:
    """Returns the name of the summed gradients of the rows of `param` that a host has."""
    return f"{_SUM}(rows of {param})"


def row_ids_name(module: str, microbatch: int | None) -> str:
    """Returns the name of the places of the rows that a host has given, held until their gradients come."""
    return f"row ids({module}, {microbatch})"


def values_not_zero_name(block_call: str, microbatch: int | None) -> str:
    """Returns the name of the values that `gist` keeps of results of ReLU in a block call."""
    return f"{VALUES_NOT_ZERO}({block_call}, {microbatch})"


def kept_input_name(value: str, microbatch: int | None) -> str:
    """Returns the name of the output `value` of a block call, where it is an input that another keeps."""
    return f"kept input({value}, {microbatch})"


def on_host_name(name: str) -> str:
    """Returns the name in host memory of what is called `name` on the device."""
    return f"host {name}"


def on_disk_name(block_call: str, microbatch: int | None) -> str:
    """Returns the name in the file of what a block call keeps."""
    return f"activations on disk({block_call}, {microbatch})"


def activation_buffer_name(direction: str, number: int) -> str:
    """Returns the name of a buffer of the host through which activations go "out" to the file, or "in"."""
    return f"{_ACTIVATION_BUFFER} {direction} {number}"


def is_activation_buffer(name: str) -> bool:
    """Returns whether `name` is that of such a buffer, which lasts from step to step."""
    return name.startswith(_ACTIVATION_BUFFER)


def coded_sum_name(action: str) -> str:
    """Returns the name of the codes that carry the sum of `action`, and of what is added up meanwhile."""
    return f"{_CODED_SUM} {action}"


def is_coded_sum(name: str) -> bool:
    """Returns whether `name` is that of such codes; a rank runs one of these sums after the other."""
    return name.startswith(_CODED_SUM)


def new_states_name(action: str) -> str:
    """Returns the name of what a strategy will keep of the sum of `action`, until STEP has decided."""
    return f"{_NEW_STATES} {action}"


def are_new_states(name: str) -> bool:
    """Returns whether `name` is that of such states."""
    return name.startswith(_NEW_STATES)


def kept_part_name(value: str, microbatch: int | None) -> str:
    """Returns the name of the part of such an input that a rank keeps."""
    return f"kept part({value}, {microbatch})"
