"""Models on the meta device: made real unit by unit, ties and buffers included."""

import torch
from torch import Tensor, nn

import fxshard
from examples.models import encoder_decoder_small, encoder_decoder_small_inputs
from tests.capture.compare import Block, differences, full, train_both


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
    fxshard.compile(model, F=2, init=reset)
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
        model, inputs = encoder_decoder_small(), encoder_decoder_small_inputs()
        inside = fxshard.trace(model, inputs, F=2)
        assert torch.empty(1).device.type == "meta"
    assert inside.text("all") == fxshard.trace(model, inputs, F=2).text("all")
    assert torch.empty(1).device.type == "cpu"
