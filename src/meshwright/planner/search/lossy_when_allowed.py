"""Lossy techniques in a search: never without `lossy = true`, and with it, where they pay and at which links.

    lossy is not given     no result is lossy: whether one learns as well is not for a cost model to say
    lossy = true           gradients may be summed as codes along the slowest data-parallel axis; such results
                           say that they are lossy, and compete with exact ones by their seconds
    coding not measured    refused (request.py): seconds to code come from `bench device`, and nowhere else

Rounds (`local_sgd`, `diloco`), delayed offload, and coded weights and activations are never proposed.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.analytic.compression_cost import codec_gain, is_codable
from meshwright.planner.machine.compression_gain import break_even_text, comparison_text
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import SearchResult


def lossy_notes(request: SearchRequest, result: SearchResult) -> Iterator[str]:
    """Yields from which link speed on each allowed codec pays, in the first lossy result, or in the best one
    if none is lossy.
    """
    for codec in filter(None, request.codecs):
        coded = [each.config for each in result.best if each.config.compress == codec]
        config = coded[0] if coded else replace(result.best[0].config, compress=codec)
        if not is_codable(request.shape, config):
            yield f"{codec} codes are not proposed: the search cannot price them in the best configuration"
            continue
        gain = codec_gain(request.shape, config, request.machine)
        if gain.saved_nbytes <= 0:
            yield (
                f"{codec} codes send no less than exact sums, because each of the ranks that share a host "
                "sends its own: they pay between ZeRO groups of one host each (--set dp_shard)"
            )
            continue
        yield f"{codec} codes pay {break_even_text(gain)}; {comparison_text(gain)}"
