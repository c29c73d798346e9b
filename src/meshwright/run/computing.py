"""The operations that compute much for each number that they make (core/work.py, RICH), as `bench device` times them.

Memory says what most operations between products take. A tanh takes ten times as long on a CPU, a random number twenty times:
GPT-2's activation is a seventh of its forward there. Each runs on memory that is there already and fits into a cache, so that
nothing but the computing counts; on a GPU, where a cache does not matter, on enough numbers to fill the device.
"""

from collections.abc import Callable

import torch

ROWS_CPU, ROWS_CUDA, WIDTH = 48, 1 << 17, 512  # on a CPU less than the heap asks the kernel for


def computing(device: torch.device) -> tuple[int, dict[str, Callable[[], object]]]:
    """How many numbers each operation makes, and the operations by their names."""
    rows = (ROWS_CUDA if device.type == "cuda" else ROWS_CPU, WIDTH)
    x, g = (torch.randn(rows, device=device) for _ in range(2))
    aten, norm, above, weight = torch.ops.aten, torch.native_layer_norm, x.abs(), torch.ones(WIDTH, device=device)
    _, mean, scale = norm(x, weight.shape, weight, weight, 1e-5)
    soft, spread, into = torch.softmax(x, -1), torch.log_softmax(x, -1), torch.empty_like(x)
    return x.numel(), {
        "tanh": lambda: torch.tanh(x),
        "exp": lambda: torch.exp(x),
        "log": lambda: torch.log(above),
        "erf": lambda: torch.erf(x),
        "sin": lambda: torch.sin(x),
        "cos": lambda: torch.cos(x),
        "gelu": lambda: aten.gelu(x),
        "gelu_tanh": lambda: aten.gelu(x, approximate="tanh"),
        "gelu_backward": lambda: aten.gelu_backward(g, x),
        "gelu_tanh_backward": lambda: aten.gelu_backward(g, x, approximate="tanh"),
        "bernoulli_": lambda: into.bernoulli_(0.9),
        "silu": lambda: aten.silu(x),
        "silu_backward": lambda: aten.silu_backward(g, x),
        "sigmoid": lambda: torch.sigmoid(x),
        "_softmax": lambda: torch.softmax(x, -1),
        "_safe_softmax": lambda: aten._safe_softmax(x, -1),
        "_softmax_backward_data": lambda: aten._softmax_backward_data(g, soft, -1, x.dtype),
        "_log_softmax": lambda: torch.log_softmax(x, -1),
        "_log_softmax_backward_data": lambda: aten._log_softmax_backward_data(g, spread, -1, x.dtype),
        "native_layer_norm": lambda: norm(x, weight.shape, weight, weight, 1e-5),
        "native_layer_norm_backward": lambda: aten.native_layer_norm_backward(
            g, x, weight.shape, mean, scale, weight, weight, (True, True, True)
        ),
    }
