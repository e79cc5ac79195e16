"""Models without memory, on the meta device or with a recorded constructor, made real unit by unit."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxshard
from examples.models import GPT, GPTConfig
from fxshard import deferred
from tests.capture.compare import Block, differences, full, train_both
from tests.parity.models import SUBJECTS


class Tied(nn.Module):
    """The first and the last weight are one parameter; two norms share their statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.first, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.second.running_mean = self.first.running_mean
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.second(x))


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_ties_stay_ties():
    with torch.device("meta"):
        model = Tied()
    names = [n for n, _ in model.named_parameters()]
    before = list(map(id, model.parameters()))
    fxshard.compile(model, F=2, init=reset)
    assert list(map(id, model.parameters())) == before
    assert model.head.weight is model.embed.weight and isinstance(model.embed.weight, fxshard.ShardedParameter)
    assert model.first.running_mean is model.second.running_mean
    assert [n for n, _ in model.named_parameters()] == names
    assert all(isinstance(p, fxshard.ShardedParameter) for p in model.parameters())
    plain = Tied()
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), model.parameters()):
            mine.copy_(full(theirs))
    assert differences(plain, model) == []
    train_both(plain, model, [torch.randint(10, (5,), generator=torch.Generator().manual_seed(i)) for i in range(3)])


def test_each_module_is_made_once_and_with_its_own_tensors_real():
    seen = []

    def init(module: nn.Module) -> None:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert own and not any(t.is_meta for t in own)
        seen.append(module)
        reset(module)

    with torch.device("meta"):
        model = Tied()
    fxshard.compile(model, F=4, init=init)
    assert len(seen) == len(set(seen)) == 6


def test_a_part_on_the_meta_device_leaves_the_rest_alone():
    torch.manual_seed(0)
    model = Tied()
    before = full(model.embed.weight)
    model.layers[1].to("meta")
    fxshard.compile(model, F=2, init=reset)
    assert torch.equal(full(model.embed.weight), before)
    assert full(model.layers[1].linear.weight).abs().max() <= 8**-0.5


def test_trace_inside_the_meta_block_the_model_was_made_in():
    """The default device is of the block, not of what is traced: `torch.arange` in forward is not on meta."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2, width=16, heads=2, vocabulary=32, length=8))
        inputs = {"tokens": torch.zeros(2, 8, dtype=torch.int64)}
        inside = fxshard.trace(model, inputs, F=2)
        assert torch.empty(1).device.type == "meta"
    assert inside.text("all") == fxshard.trace(model, inputs, F=2).text("all")
    assert torch.empty(1).device.type == "cpu"


def test_a_module_initialises_itself_and_then_the_model_around_it_does():
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.5)

    with torch.device("meta"):
        model = nn.Sequential(Owner(), nn.Linear(4, 4))
    fxshard.compile(model, F=2)
    own, other = full(model[0].layers[1].weight), full(model[1].weight)
    assert bool((own == 0.5).all()) and 0 < full(model[0].layers[1].bias).abs().max() <= 0.5
    assert 0 < other.abs().max() <= 0.5 and len(other.unique()) == 16


def test_what_nothing_initialises_is_named():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("count", torch.zeros(()))

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(ValueError, match=r"meta device \(scale, count\) needs an init function.*deferred_init"):
        fxshard.compile(model, F=2)
    assert all(p.is_meta for p in model.parameters())


# -- a recorded constructor


def both(constructor: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Made eagerly and recorded, from one seed; the generator ends in the same state."""
    torch.manual_seed(5)
    eager = constructor()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    recorded = fxshard.deferred_init(constructor)
    assert torch.equal(torch.get_rng_state(), state)
    return eager, recorded


def check_same(eager: nn.Module, recorded: nn.Module, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one unit, weak references
        fxshard.compile(recorded, F=3, **options)
    pairs = list(zip(recorded.named_parameters(), eager.named_parameters(), strict=True))
    assert all(isinstance(p, fxshard.ShardedParameter) for (_, p), _ in pairs)
    assert [n for (n, p), (m, q) in pairs if n != m or not torch.equal(full(p), q)] == []
    about = [[(p.stride(), p.dtype, p.requires_grad) for _, p in named] for named in zip(*pairs)]
    assert about[0] == about[1]
    buffers = list(zip(recorded.named_buffers(), eager.named_buffers(), strict=True))
    assert [n for (n, b), (m, c) in buffers if n != m or not torch.equal(b, c)] == []
    assert list(recorded.state_dict()) == list(eager.state_dict())


class Draws(nn.Module):
    """What constructors do with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        nn.init.orthogonal_(self.layers[0].weight)
        nn.init.trunc_normal_(self.layers[1].weight)
        self.layers[2].weight.data.normal_(0, 0.02)
        self.layers[2].weight.data[1].zero_()
        self.layers[3].weight = self.layers[0].weight
        self.norm = nn.BatchNorm1d(4)
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.parametrized = nn.ModuleList(
            made(nn.Linear(4, 3))
            for made in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
        )
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.copied = copy.deepcopy(self.layers[1])
        self.embedding = nn.Embedding(7, 3, padding_idx=0)
        self.recurrent = nn.LSTM(3, 4)
        self.codes = nn.Parameter(torch.randint(0, 255, (5,), dtype=torch.uint8), requires_grad=False)
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 4)]
        self.made_of_others = nn.Parameter(torch.randn(3, 4) * self.rates[1] + self.layers[0].weight[0].detach())
        self.scale, self.empty = nn.Parameter(torch.tensor(2.6)), nn.Parameter(torch.zeros(0, 8))
        self.part = nn.Parameter(torch.randn(6, 4)[1:3])
        self.own_generator = nn.Parameter(torch.empty(5).normal_(generator=torch.Generator().manual_seed(3)))
        self.half = nn.Linear(3, 3).to(torch.bfloat16).requires_grad_(False)
        self.register_buffer("positions", torch.arange(4, device=self.scale.device) / 4, persistent=False)
        self.register_buffer("table", torch.rand(3))
        self.dropout = nn.Dropout(torch.rand(()).item())
        self.kept = int(torch.randperm(9)[self.positions.argmax()])


def test_the_bits_of_the_constructor():
    eager, recorded = both(Draws)
    assert recorded.rates == eager.rates and recorded.dropout.p == eager.dropout.p and recorded.kept == eager.kept
    check_same(eager, recorded, units="none")
    assert recorded.layers[3].weight is recorded.layers[0].weight


@pytest.mark.parametrize(
    "subject",
    ["gpt", "llama", "resnet", *(pytest.param(s, marks=pytest.mark.full) for s in ("whisper", "mamba", "t5"))],
)
def test_the_bits_of_the_constructors_of_models(subject: str) -> None:
    check_same(*both(lambda: SUBJECTS[subject].build(0.1)))


class Unusual(nn.Module):
    """What recorders lose: operators that return nothing, views that conjugate, defaults that change, plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(3, 4)) for _ in range(2))
        with torch.no_grad():
            torch._foreach_mul_([self.first, self.second], 0.5)
            torch.arange(4.0, out=self.first[0])
            self.second.unsqueeze_(0).squeeze_(0)
        wave = torch.randn(4, dtype=torch.complex64)
        self.register_buffer("conjugate", (wave.conj() * 2).resolve_conj())
        self.register_buffer("negative", wave.conj().imag.clone())
        torch.set_default_dtype(torch.float64)
        self.wide = nn.Parameter(torch.randn(20).float())
        self.register_buffer("third", torch.full((2,), 1 / 3))
        torch.set_default_dtype(torch.float32)
        self.register_buffer("all_of_it", torch.zeros(4))
        self.register_buffer("part", self.all_of_it[:2])
        self.scale, self.anchors = torch.arange(3.0), {"a": [torch.ones(2), self.first]}
        self.alias = self.third
        table = numpy.zeros(3, dtype="float32")
        self.staged = nn.ParameterList()
        for i in range(2):
            table[:] = i
            self.staged.append(nn.Parameter(torch.empty(3).copy_(torch.from_numpy(table))))
        self.skipped = nn.utils.skip_init(nn.Linear, 3, 3)
        nn.init.ones_(self.skipped.weight)
        nn.init.ones_(self.skipped.bias)


def test_what_recorders_lose():
    eager, recorded = both(Unusual)
    check_same(eager, recorded, units="none")
    assert torch.equal(recorded.scale, eager.scale) and type(recorded.scale) is Tensor
    assert recorded.anchors["a"][1] is recorded.first and torch.equal(recorded.anchors["a"][0], torch.ones(2))
    assert recorded.alias is recorded.third
    recorded.all_of_it.add_(1)
    assert recorded.part.tolist() == [1, 1]


class Overwritten(nn.Module):
    """Storages that are written all over, with values from themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.filled, self.copied, self.set, self.drawn, self.twice = (nn.Parameter(torch.rand(3, 3)) for _ in range(5))
        with torch.no_grad():
            self.filled.fill_(self.filled[1, 1])
            self.copied.copy_(self.copied[1:2].expand_as(self.copied))
            self.set[:] = self.set[2]
            self.drawn.bernoulli_(self.drawn)
            self.twice.copy_(self.twice.T.clone())


def test_a_storage_written_over_with_what_was_in_it():
    eager, recorded = both(Overwritten)
    check_same(eager, recorded, units="none")
    assert 0 < eager.filled[0, 0] < 1


def test_asking_for_a_device_replays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []
    monkeypatch.setattr(deferred, "replay", lambda tensor, place=None: replayed.append(tensor))

    class Indexes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))
            with torch.no_grad():
                for i in range(8):
                    self.weight[i].add_(i)
                    assert self.weight.device.type == "cpu"

    fxshard.deferred_init(Indexes)
    assert replayed == []


def test_what_is_done_to_a_recorded_model_is_recorded_too():
    def after(model: nn.Module) -> nn.Module:
        model.apply(lambda m: nn.init.normal_(m.weight, std=3.0) if isinstance(m, nn.Linear) else None)
        model.load_state_dict({"0.bias": torch.full((4,), 7.0)}, strict=False)
        return model.to(torch.float64)

    eager, recorded = both(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    torch.manual_seed(6)
    after(eager)
    torch.manual_seed(6)
    after(recorded)
    assert recorded[0].weight.dtype == torch.float64
    check_same(eager, recorded)


def test_a_recorded_model_trains_and_traces_as_the_eager_one():
    eager, recorded = both(Tied)
    tokens = [torch.randint(10, (5,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    assert fxshard.trace(recorded, tokens[0], F=2).text("all") == fxshard.trace(eager, tokens[0], F=2).text("all")
    fxshard.compile(recorded, F=2, example_inputs=tokens[0])
    assert recorded.head.weight is recorded.embed.weight
    assert recorded.first.running_mean is recorded.second.running_mean
    train_both(eager, recorded, tokens)


def test_an_init_given_wins_over_the_record():
    _, recorded = both(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    def ones(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.ones_(p)

    fxshard.compile(recorded, F=2, init=ones)
    assert all(bool((full(p) == 1).all()) for p in recorded.parameters())


def test_a_failure_while_recorded_models_are_made_real_leaves_them_recorded():
    table = torch.arange(4.0)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.weight = nn.Parameter(torch.empty(4))
            self.weight.data.copy_(table)

    model = fxshard.deferred_init(Reads)
    before = list(model.parameters())
    shapes = [p.shape for p in before]
    table.add_(1)
    with pytest.raises(RuntimeError, match="real tensor of shape \\(4,\\) that the constructor read was changed"):
        fxshard.compile(model, F=2)
    table.sub_(1)
    assert not fxshard.is_compiled(model) and all(map(deferred.is_deferred, model.parameters()))
    assert list(model.parameters()) == before and [p.shape for p in before] == shapes


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(TypeError, match=r"returned int, not an nn\.Module"):
        fxshard.deferred_init(lambda: 3)
    with pytest.raises(RuntimeError, match="resizes a tensor in place"):
        fxshard.deferred_init(lambda: nn.ParameterList([torch.empty(0).resize_(3)]))
    outside = torch.ones(2)
    with pytest.raises(RuntimeError, match="writes to real tensors and to what the constructor made"):
        fxshard.deferred_init(lambda: torch._foreach_mul_([torch.ones(2), outside], 2))
