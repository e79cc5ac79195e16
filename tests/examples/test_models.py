"""The example models: their sizes, their inputs, how they start, and that a compiler can capture them."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples import models
from examples.models import GPT, GPTConfig

COUNTS = {
    "gpt_demo": 4_902_912,
    "gpt_512x6": 27_435_008,
    "gpt_768x12": 162_447_360,
    "gpt_1b": 1_418_842_112,
    "gpt_175b": 175_215_501_312,
    "resnet_small": 175_066,
    "encoder_decoder_small": 1_524_224,
    "mlp_odd": 74,
}
SMALL = ["gpt_demo", "resnet_small", "encoder_decoder_small", "mlp_odd"]
TINY = GPTConfig(layers=2, width=32, heads=4, vocabulary=64, length=16)
TINY_EXPLICIT = GPTConfig(layers=2, width=32, heads=4, vocabulary=64, length=16, explicit_attention=True)
TINY_TIED = GPTConfig(layers=2, width=32, heads=4, vocabulary=64, length=16, tied=True)


class AllocationRecorder(TorchDispatchMode):
    """Collects the results of all operations that are not on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.allocated: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves(result)):
            self.allocated.append(str(func))
        return result


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens_for(config: GPTConfig, batch: int = 3) -> dict[str, Tensor]:
    shape = (batch, config.length)
    generator = seeded()
    return {name: torch.randint(config.vocabulary, shape, generator=generator) for name in ("tokens", "targets")}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def spoil(model: nn.Module) -> None:
    """Overwrite what uninitialized memory may happen to hold."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(math.nan if tensor.is_floating_point() else 1)


# ---- the registry ----------------------------------------------------------------------------------------------------


def test_every_entry_is_counted_here() -> None:
    assert list(models.MODELS) == list(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name: str) -> None:
    factory, _ = models.get(name)
    assert sum(parameter.numel() for parameter in factory(device="meta").parameters()) == COUNTS[name]
    assert f"{COUNTS[name]:,} parameters" in (factory.__doc__ or "")


@pytest.mark.parametrize("name", COUNTS)
def test_meta_build_and_forward_allocate_nothing(name: str) -> None:
    factory, inputs_factory = models.get(name)
    with AllocationRecorder() as recorder:
        model = factory(device="meta")
        loss = model(**inputs_factory(device="meta", generator=seeded()))
    assert recorder.calls > 0
    assert recorder.allocated == []
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert loss.shape == ()


def test_recorder_sees_allocations() -> None:
    with AllocationRecorder() as recorder:
        models.mlp_odd()
    assert recorder.allocated


@pytest.mark.parametrize("name", COUNTS)
def test_inputs_take_batch_device_and_generator(name: str) -> None:
    _, inputs_factory = models.get(name)
    first, again = inputs_factory(batch=2, generator=seeded(3)), inputs_factory(batch=2, generator=seeded(3))
    other = inputs_factory(batch=2, generator=seeded(4))
    assert "targets" in first
    for key, tensor in first.items():
        assert tensor.shape[0] == 2 and tensor.is_contiguous()
        assert torch.equal(tensor, again[key])
    assert not all(torch.equal(tensor, other[key]) for key, tensor in first.items())


def test_targets_are_the_next_tokens() -> None:
    for name in ("gpt_demo", "encoder_decoder_small"):
        inputs = models.get(name)[1]()
        assert torch.equal(inputs["tokens"][:, 1:], inputs["targets"][:, :-1])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gpt_demo", (8, 128, 256)),
        ("gpt_175b", (1, 2048, 50000)),
        ("resnet_small", (8, 10)),
        ("encoder_decoder_small", (8, 24, 512)),
        ("mlp_odd", (8, 7)),
    ],
)
def test_output_without_targets(name: str, shape: tuple[int, ...]) -> None:
    factory, inputs_factory = models.get(name)
    inputs = inputs_factory(device="meta")
    del inputs["targets"]
    assert factory(device="meta")(**inputs).shape == shape


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype(name: str, dtype: torch.dtype) -> None:
    factory, inputs_factory = models.get(name)
    model = factory(device="meta", dtype=dtype)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    loss = model(**inputs_factory(device="meta"))
    expected = dtype if name == "mlp_odd" else torch.promote_types(dtype, torch.float32)
    assert loss.dtype == expected


def test_unknown_name_suggests_and_lists() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt_dem'; did you mean 'gpt_demo'\?") as caught:
        models.get("gpt_dem")
    assert all(name in str(caught.value) for name in models.MODELS)
    with pytest.raises(ValueError, match=r"unknown model 'zzz' \(allowed: gpt_demo, "):
        models.get("zzz")


# ---- starting values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_initialize_after_to_empty_equals_building(name: str) -> None:
    factory, _ = models.get(name)
    torch.manual_seed(5)
    built = factory()
    model = factory(device="meta").to_empty(device="cpu")
    spoil(model)
    torch.manual_seed(5)
    models.initialize(model)
    state = model.state_dict()
    assert state.keys() == built.state_dict().keys()
    for key, tensor in built.state_dict().items():
        assert torch.equal(state[key], tensor), key


@pytest.mark.parametrize("config", [TINY, TINY_EXPLICIT, TINY_TIED], ids=["plain", "explicit", "tied"])
def test_gpt_initialize_after_to_empty_equals_building(config: GPTConfig) -> None:
    torch.manual_seed(5)
    built = GPT(config)
    model = GPT(config, device="meta").to_empty(device="cpu")
    spoil(model)
    torch.manual_seed(5)
    models.initialize(model)
    inputs = tokens_for(config)
    assert torch.equal(model(**inputs), built(**inputs))
    assert (model.head.weight is model.token_embedding.weight) == config.tied
    for (key, ours), (_, theirs) in zip(model.named_buffers(), built.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), key


def test_gpt_starts_as_gpt2_does() -> None:
    torch.manual_seed(0)
    model = models.gpt_demo()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            std = 0.02 / math.sqrt(12) if "project" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.03 * std, name
    # Nearly uniform predictions: the first loss is that of guessing among 256 bytes.
    assert model(**models.gpt_demo_inputs(generator=seeded())).item() == pytest.approx(math.log(256), abs=0.1)


def test_mlp_odd_norm_starts_at_one() -> None:
    model = models.mlp_odd()
    assert bool((model.norm.weight == 1).all())
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert shapes == [(5, 7), (5,), (1, 5), (1,), (7, 1), (7,), (7,), (7,)]


# ---- what they compute -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_one_step_is_finite_and_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    factory, inputs_factory = models.get(name)
    model, inputs = factory(), inputs_factory(generator=seeded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = model(**inputs)
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), key
        # A key's bias shifts all scores of a query alike, so only rounding reaches it.
        assert parameter.grad.any() or key.endswith("key.bias"), key
    optimizer.step()
    after = model(**inputs)
    assert bool(loss.isfinite()) and after.item() < loss.item()


def test_loss_is_cross_entropy_of_the_logits() -> None:
    torch.manual_seed(0)
    model, inputs = GPT(TINY), tokens_for(TINY)
    logits = model(inputs["tokens"])
    assert logits.shape == (3, 16, 64)
    picked = logits.log_softmax(-1).gather(-1, inputs["targets"].unsqueeze(-1))
    torch.testing.assert_close(model(**inputs), -picked.mean())


def test_explicit_attention_equals_fused() -> None:
    torch.manual_seed(0)
    fused, explicit = GPT(TINY), GPT(TINY_EXPLICIT)
    explicit.load_state_dict(fused.state_dict())  # the mask is no part of the state
    # Larger weights than at the start, so that the attention is far from uniform.
    with torch.no_grad():
        for model in (fused, explicit):
            for key, parameter in model.named_parameters():
                if key.endswith("qkv.weight"):
                    parameter.mul_(30)
    inputs = tokens_for(TINY)
    torch.testing.assert_close(explicit(inputs["tokens"]), fused(inputs["tokens"]))
    fused(**inputs).backward()
    explicit(**inputs).backward()
    torch.testing.assert_close(gradients(explicit), gradients(fused))


@pytest.mark.parametrize("config", [TINY, TINY_EXPLICIT], ids=["fused", "explicit"])
def test_no_token_sees_a_later_one(config: GPTConfig) -> None:
    torch.manual_seed(0)
    model, tokens = GPT(config), tokens_for(config)["tokens"]
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % config.vocabulary
    moved = (model(tokens) - model(changed)).detach().abs().amax(dim=(0, 2))
    assert float(moved[:10].max()) < 1e-6  # equal but for the order of summation
    assert float(moved[10:].min()) > 1e-6


def test_decoder_reads_the_source_and_no_later_token() -> None:
    torch.manual_seed(0)
    model, inputs = models.encoder_decoder_small(), models.encoder_decoder_small_inputs(batch=2, generator=seeded())
    source, tokens = inputs["source"], inputs["tokens"]
    before = model(source, tokens).detach()
    late, other = tokens.clone(), source.clone()
    late[:, 20] = (late[:, 20] + 1) % 512
    other[:, 31] = (other[:, 31] + 1) % 512
    moved = (before - model(source, late)).detach().abs().amax(dim=(0, 2))
    assert float(moved[:20].max()) < 1e-5 and float(moved[20].min()) > 1e-3
    assert float((before - model(other, tokens)).detach().abs().amax(dim=(0, 2)).min()) > 1e-5


def test_shorter_sequences_and_too_long_ones() -> None:
    model = GPT(TINY_EXPLICIT)
    tokens = tokens_for(TINY)["tokens"]
    assert model(tokens[:, :5]).shape == (3, 5, 64)
    with pytest.raises(ValueError, match=r"at most 16 long \(GPTConfig.length\), got 32"):
        model(torch.cat([tokens, tokens], dim=1))


def test_dropout_acts_in_training_only() -> None:
    for explicit in (False, True):
        config = GPTConfig(2, 32, 4, 64, 16, dropout=0.5, explicit_attention=explicit)
        model, tokens = GPT(config), tokens_for(config)["tokens"]
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_resnet_updates_its_statistics() -> None:
    model = models.resnet_small()
    before = {key: buffer.clone() for key, buffer in model.named_buffers()}
    model(**models.resnet_small_inputs(generator=seeded()))
    assert before
    assert all(not torch.equal(buffer, before[key]) for key, buffer in model.named_buffers())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "multiple of heads, got width=32, heads=3"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_config_rejects(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{"layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "length": 16, **changes})


# ---- capture ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, TINY_EXPLICIT, TINY_TIED], ids=["fused", "explicit", "tied"])
def test_gpt_is_captured_whole(config: GPTConfig) -> None:
    torch.manual_seed(0)
    model, inputs = GPT(config), tokens_for(config)
    model(**inputs).backward()
    expected = gradients(model)
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)
    loss.backward()
    torch.testing.assert_close(loss, model(**inputs))
    assert len(expected) == len(list(model.parameters()))
    torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("name", ["resnet_small", "encoder_decoder_small", "mlp_odd"])
def test_other_models_are_captured_whole(name: str) -> None:
    torch.manual_seed(0)
    factory, inputs_factory = models.get(name)
    model, inputs = factory(), inputs_factory(batch=2, generator=seeded())
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)
    loss.backward()
    torch.testing.assert_close(loss, model(**inputs))
