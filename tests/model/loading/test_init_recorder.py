"""Operations of a constructor on its parameters are recorded, or refused by name; patches are removed."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.model.loading.deferred_init import defer_init
from meshwright.model.loading.init_recorder import is_meta
from meshwright.plan.job.errors import PlanError
from tests.model.loading.meta_models import assert_alike, made, only


class Initialized(nn.Module):
    """One of everything that torch.nn.init and tensor methods can do."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Linear(8, 12)
        nn.init.orthogonal_(self.orthogonal.weight, gain=2.0)
        self.identity = nn.Linear(8, 8)
        nn.init.eye_(self.identity.weight)
        self.dirac = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.dirac.weight)
        self.recurrent = nn.LSTM(8, 8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.embedding = nn.Embedding(20, 8, padding_idx=3)
        self.truncated = nn.Linear(64, 64)
        nn.init.trunc_normal_(self.truncated.weight, std=1.0, a=-1.0, b=1.0)
        self.listed = nn.ParameterList([nn.Parameter(torch.full((3,), 0.25)), nn.Parameter(torch.ones(3))])
        self.named = nn.ParameterDict({"zeros": nn.Parameter(torch.zeros(2, 2))})
        self.register_parameter("counted", nn.Parameter(torch.arange(6.0).view(2, 3)))
        self.edited = nn.Linear(10, 20)
        with torch.no_grad():
            self.edited.bias.zero_()
            self.edited.bias[3:5] = torch.tensor([1.0, 2.0])
            self.edited.bias.add_(torch.arange(20.0))
            self.edited.weight.fill_(2.0)
            self.edited.weight.data[torch.tensor([True] * 5 + [False] * 15)] = 7.0
            self.edited.weight.mul_(torch.full((20, 10), 0.5))
        self.wide = nn.Linear(2, 2).double()
        self.to("cpu")


def test_every_initialiser_of_torch_is_recorded():
    _, module = made(Initialized)
    torch.manual_seed(0)
    assert_alike(module, Initialized())
    weight = module.orthogonal.weight
    assert torch.allclose(weight.T @ weight, 4 * torch.eye(8), atol=1e-5)
    assert module.truncated.weight.abs().max() <= 1


def test_a_truncated_normal_imported_by_name_is_recorded():
    from torch.nn.init import trunc_normal_

    _, module = made(
        lambda: only(nn.Module(), trunc_normal_(nn.Linear(64, 64).weight, std=0.5, a=-0.5, b=0.5))
    )
    assert module.weight.std().item() == pytest.approx(0.27, rel=0.05)


def test_a_value_computed_before_registration_is_kept():
    _, module = made(
        lambda: only(nn.Module(), nn.Parameter(torch.randn(3) * 0.02 + torch.tensor([1.0, 2.0, 3.0])))
    )
    assert torch.allclose(module.weight, torch.tensor([1.0, 2.0, 3.0]), atol=0.2)
    assert torch.equal(
        module.weight,
        made(lambda: only(nn.Module(), nn.Parameter(torch.randn(3) * 0.02 + torch.arange(1.0, 4.0))))[
            1
        ].weight,
    )


def test_the_constructor_leaves_the_generator_of_torch_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    defer_init(lambda: only(nn.Module(), nn.Parameter(torch.randn(3))), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_threads_build_ordinary_modules_meanwhile():
    built: list[nn.Module] = []

    def build() -> nn.Module:
        other = threading.Thread(target=lambda: built.append(nn.Linear(4, 4)))
        other.start()
        other.join()
        return nn.Linear(2, 2)

    defer_init(build, 0)
    assert not is_meta(built[0].weight)


def test_threads_may_defer_initialization_at_the_same_time():
    drawn: list[torch.Tensor] = []
    threads = [
        threading.Thread(
            target=lambda: drawn.append(
                made(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]))[1][7].weight
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn) == 3
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_everything_patched_is_restored_when_the_constructor_fails():
    original = nn.init._no_grad_trunc_normal_

    def fail() -> nn.Module:
        nn.Linear(2, 2)
        raise KeyError("no")

    with pytest.raises(KeyError):
        defer_init(fail, 0)
    assert nn.init._no_grad_trunc_normal_ is original
    assert not is_meta(nn.Linear(2, 2).weight)


def drops_half() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight.data.bernoulli_(0.5)
    return layer


def reads_a_value() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.scale = layer.weight.norm().item()
    return layer


def fills_a_buffer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("seen", torch.zeros(4, 4))
    layer.seen.copy_(layer.weight.data)
    return layer


def makes_a_buffer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("seen", layer.weight.detach().clone())
    return layer


def shares_memory() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.other = nn.Parameter(layer.weight.data)
    return layer


def shares_memory_beforehand() -> nn.Module:
    base, layer = torch.randn(4), nn.Linear(4, 4)
    layer.first, layer.second = nn.Parameter(base), nn.Parameter(base)
    return layer


def writes_behind() -> nn.Module:
    base, layer = torch.randn(4), nn.Linear(4, 4)
    layer.first = nn.Parameter(base)
    base.zero_()
    return layer


@pytest.mark.parametrize(
    ("build", "where", "message"),
    [
        (drops_half, "Linear.weight", "aten.bernoulli_.float on a parameter cannot be replayed"),
        (reads_a_value, "", "reads the value of a parameter"),
        (fills_a_buffer, "Linear.weight", "into an ordinary tensor or buffer"),
        (makes_a_buffer, "seen", "the buffer is computed from a parameter"),
        (shares_memory, "other", "shares its memory with weight"),
        (shares_memory_beforehand, "Linear.second", "shares its memory with Linear.first"),
        (writes_behind, "the tensor written by aten.zero_.default", "shares its memory with Linear.first"),
        (lambda: only(nn.Module(), nn.Parameter(torch.empty(3, 4))), "weight", "(3, 4) is never initialized"),
        (lambda: nn.LazyLinear(3), "LazyLinear.weight", "a lazy parameter"),
        (
            lambda: only(nn.Module(), nn.Parameter(torch.ones(3, 3).to_sparse())),
            "Module.weight",
            "layout torch.sparse_coo",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Lazy modules are a new feature.*")
def test_what_cannot_be_replayed_is_refused_by_name(build: Callable[[], nn.Module], where: str, message: str):
    with pytest.raises(PlanError) as caught:
        defer_init(build, 0)
    assert caught.value.diagnostics[0].location == where
    assert message in caught.value.diagnostics[0].problem


def test_all_parameters_that_are_never_initialised_are_reported_together():
    with pytest.raises(PlanError) as caught:
        defer_init(lambda: nn.ParameterList(nn.Parameter(torch.empty(2)) for _ in range(3)), 0)
    assert [diagnostic.location for diagnostic in caught.value.diagnostics] == ["0", "1", "2"]


def test_a_parameter_larger_than_any_memory_is_constructed():
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1 << 20, 1 << 20).t())
            nn.init.normal_(self.weight)

    drawn = defer_init(Huge, 0)
    assert drawn.logical_params["weight"].shape == (1 << 20, 1 << 20)
    assert is_meta(drawn.instantiate().weight)


def test_a_large_tensor_that_stays_one_is_ordinary_memory():
    kept = []

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kept.append(torch.empty(1 << 27, dtype=torch.float16))
            kept[0][:3] = torch.tensor([1.0, 2.0, 3.0])
            self.weight = nn.Parameter(kept[0][:4].clone())

    _, module = made(Filled)
    assert module.weight.tolist()[:3] == [1.0, 2.0, 3.0]
    assert kept[0].dtype == torch.float16
    assert len(kept[0]) == 1 << 27
