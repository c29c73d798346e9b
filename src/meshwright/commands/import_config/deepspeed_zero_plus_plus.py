"""ZeRO++ of DeepSpeed: weights that are gathered within hosts, and codes of weights and of gradients.

zero_hpz_partition_size       hpz: a second shard of the weights within so many ranks
zero_quantized_weights        quantized_weights: int8 codes of exact masters
zero_quantized_gradients      compress, mode qgz: int4 codes within hosts, whose ranks zero_hpz_partition_size
                              names, and int8 codes between them; what they lose is owed
"""

from meshwright.commands.import_config.deepspeed_offload import ZERO
from meshwright.commands.import_config.option_rules import OFF_TEXT, Rule, Translation, mapped, refused

HPZ, QWZ = f"{ZERO}zero_hpz_partition_size", f"{ZERO}zero_quantized_weights"
QGZ = f"{ZERO}zero_quantized_gradients"
LOCO = (
    "LoCo's moving average of what codes lose is not there",
    "zero_quantized_gradients without it: what codes lose is added to the next gradient as it is",
)

ZERO_PLUS_PLUS_RULES: dict[str, Rule] = {
    HPZ: mapped("hpz.partition_size"),
    QWZ: mapped("strategies", reason="quantized_weights: int8 with a scale for each 256 elements"),
    QGZ: mapped("compress.ranks_per_host", reason="mode qgz: int4 within hosts, int8 between, residuals"),
    **refused(*LOCO, f"{ZERO}zeropp_loco_param"),
    **refused(
        "frozen weights are not stored as codes",
        "leave it out; zero_quantized_weights gathers them as codes too",
        f"{ZERO}zero_quantized_nontrainable_weights",
    ),
}


def partition_size(config: Translation, stage: int, num_ranks: int, offloaded: tuple[str, ...]) -> int:
    """Returns the ranks among which backward gathers weights (ZeRO++ hpZ), of the `num_ranks` that share them
    (0: unknown); 1 where that changes nothing.
    """
    size = config.get(HPZ, 1) or 1
    if not _applies(config, HPZ, stage, is_on=size > 1):
        return 1
    if size == num_ranks:
        config.drop(HPZ, "all ranks that share the weights are one partition, as without it")
    elif "weights" in offloaded:
        text = "shards of weights rest off the device, and the second shard would lie on the device"
        config.refuse(HPZ, text, "leave it out, or offload_param")
    else:
        return size
    return 1


def quantizes_weights(config: Translation, stage: int, num_ranks: int) -> bool:
    """Returns whether weights are gathered as codes (ZeRO++ qwZ) by `num_ranks` ranks (0: unknown)."""
    if not _applies(config, QWZ, stage, is_on=config.get(QWZ, False)):
        return False
    if num_ranks == 1:
        config.drop(QWZ, "one rank gathers nothing")
    return num_ranks != 1


def gradient_ranks_per_host(config: Translation, stage: int, num_ranks: int, mics: int) -> int:
    """Returns the ranks of a host that sum gradients as codes (ZeRO++ qgZ), of `num_ranks` in all (0:
    unknown); 0: sums are exact. `mics` are the ranks that share the weights, if above 0.
    """
    near = config.get(HPZ, 1) or 1
    if not _applies(config, QGZ, stage, is_on=config.get(QGZ, False)):
        return 0
    if num_ranks == 1:
        config.drop(QGZ, "one rank sums nothing")
    elif mics > 0:
        text = (
            "shards of MiCS are summed within hosts first, and codes of two levels need all ranks in one sum"
        )
        config.refuse(QGZ, text, 'use compress with mode = "int8": codes between hosts')
    elif near == 1:
        text = "the ranks of a host are not known"
        config.refuse(QGZ, text, "set zero_hpz_partition_size, or ranks_per_host of compress, mode qgz")
    elif num_ranks and (num_ranks % near or num_ranks == near):
        text = f"{num_ranks} ranks are not several hosts of {near} (zero_hpz_partition_size)"
        config.refuse(QGZ, text, 'leave it out, or use compress with mode = "int8"')
    else:
        return int(near)
    return 0


def _applies(config: Translation, option: str, stage: int, *, is_on: bool) -> bool:
    """Returns whether `option` changes anything with this ZeRO stage; drops it if not."""
    if not is_on:
        config.drop(option, OFF_TEXT)
    elif stage < 3:
        config.drop(option, "only with ZeRO stage 3, as there")
    return is_on and stage >= 3
