"""Ranks that disagree: a named error on every rank, no hang, nothing half-sharded left behind."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from tests.distributed.harness import Ranks


class Blocks(nn.Module):
    """`depth` equal layers; `broken` makes forward uncapturable; `skip` leaves the last layer out of forward."""

    def __init__(self, depth: int = 2, width: int = 8, broken: bool = False, skip: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.broken, self.skip = broken, skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: len(self.layers) - self.skip]:
            x = torch.relu(layer(x))
            if self.broken:
                print(x.sum().item())
        return x.sum()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: getattr(p, "full_tensor", p.detach)().clone() for n, p in model.named_parameters()}


def outcome(model: nn.Module, act: str, **options: object) -> dict[str, object]:
    """Compile and run `model`; what was raised, what the model is then, and whether it still works once it is right."""
    error: Exception | None = None
    before = whole(model)
    try:
        fxshard.compile(model, timeout_s=20.0, **options)
        if act == "run":
            model(torch.ones(2, 8)).backward()
    except Exception as caught:
        error = caught
    plain = all(type(p) is nn.Parameter for p in model.parameters())
    sharded = fxshard.is_compiled(model) and all(isinstance(p, fxshard.ShardedParameter) for p in model.parameters())
    equal = all(torch.equal(p, before[n]) for n, p in whole(model).items()) if plain or sharded else False
    model.broken, model.skip = False, 0  # type: ignore[assignment]
    model(torch.ones(2, 8)).backward()
    return {
        "type": type(error).__name__,
        "text": str(error),
        "is": "plain" if plain else "sharded" if sharded else "half-sharded",
        "equal": equal,
        "trains": all(p.grad is not None for p in model.parameters()),
    }


def different_models() -> dict[str, object]:
    torch.manual_seed(0)
    return outcome(Blocks(depth=2 + dist.get_rank()), "compile")


def different_options() -> dict[str, object]:
    torch.manual_seed(0)
    return outcome(Blocks(), "compile", rate_limit=2 + dist.get_rank())


def different_forward() -> dict[str, object]:
    torch.manual_seed(0)
    return outcome(Blocks(skip=dist.get_rank() == 1), "run")


def one_cannot_capture() -> dict[str, object]:
    torch.manual_seed(0)
    return outcome(Blocks(broken=dist.get_rank() == 1), "run")


def none_can_capture() -> dict[str, object]:
    torch.manual_seed(0)
    return outcome(Blocks(broken=True), "run")


def test_different_models(ranks: Ranks) -> None:
    for result in ranks.run(2, different_models):
        assert result["type"] == "AgreementError"
        assert "layers.2" in str(result["text"]) and "nothing was sharded" in str(result["text"])
        assert result["is"] == "plain" and result["equal"] and result["trains"]


def test_different_options(ranks: Ranks) -> None:
    for result in ranks.run(2, different_options):
        assert result["type"] == "AgreementError"
        assert "rate_limit=2" in str(result["text"]) and "rate_limit=3" in str(result["text"])
        assert result["is"] == "plain" and result["equal"] and result["trains"]


def test_different_communication(ranks: Ranks) -> None:
    for result in ranks.run(2, different_forward):
        assert result["type"] == "AgreementError"
        assert "layers.1" in str(result["text"])
        assert result["is"] == "sharded" and result["equal"] and result["trains"]


def test_one_rank_cannot_capture(ranks: Ranks) -> None:
    first, second = ranks.run(2, one_cannot_capture)
    assert first["type"] == "AgreementError" and "rank 1 failed with CaptureError" in str(first["text"])
    assert second["type"] == "CaptureError" and "test_agreement.py" in str(second["text"])
    for result in (first, second):
        assert result["is"] == "sharded" and result["equal"] and result["trains"]


def test_no_rank_can_capture(ranks: Ranks) -> None:
    for result in ranks.run(2, none_can_capture):
        assert result["type"] == "CaptureError" and "test_agreement.py" in str(result["text"])
        assert result["is"] == "sharded" and result["equal"] and result["trains"]


def one_is_refused(options: dict[str, object]) -> dict[str, object]:
    torch.manual_seed(0)
    other = dist.get_rank() == 1
    return outcome(Blocks(broken=other and not options), "compile", **(options if other else {}), **TRIED)


TRIED = {"example_inputs": (torch.ones(2, 8),)}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, "CaptureError", "could not be captured whole"),
        ({"rate_limt": 2}, "TypeError", "Did you mean 'rate_limit'"),
        ({"units": "leyers.*"}, "ValueError", "matches no module"),
        ({"F": 3}, "ValueError", "allowed are 1, 2"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_one_rank_alone_refuses_is_told_to_all_before_anything_is_sharded(
    ranks: Ranks, options: dict[str, object], error: str, text: str
) -> None:
    first, second = ranks.run(2, one_is_refused, options)
    assert second["type"] == error and text in str(second["text"])
    assert first["type"] == "AgreementError" and f"rank 1 failed with {error}" in str(first["text"])
    assert text in str(first["text"]) and "nothing was sharded" in str(first["text"])
    assert first["is"] == second["is"] == "plain" and first["equal"] and second["equal"]


def one_comes_late() -> list[str]:
    """Rank 1 gets to its first call only after rank 0 has given up; then both try again."""
    model = fxshard.compile(Blocks(), timeout_s=2.0)
    texts = []
    if dist.get_rank() == 1:
        time.sleep(3.0)
    with pytest.raises(fxshard.AgreementError) as caught:
        model(torch.ones(2, 8))
    texts.append(str(caught.value))
    assert fxshard.is_compiled(model)
    dist.barrier()
    model(torch.ones(2, 8)).backward()
    return texts


def test_a_rank_that_comes_late_is_named_and_told_and_both_may_try_again(ranks: Ranks) -> None:
    (first,), (second,) = ranks.run(2, one_comes_late)
    assert first == "rank 0 waited 2 s for rank 1 to compare 'skeleton', in vain. Look at their output first"
    assert second == "rank 1 came to compare 'skeleton' when rank 0 had given up waiting for it"


def differs(what: str) -> str:
    model, other = Blocks(), dist.get_rank() == 1
    options: dict[str, object] = {}
    if what == "buffers":
        model.register_buffer("table", torch.zeros(3 + other))
    elif what == "init":
        options["init"] = nn.Module.requires_grad_ if other else None
    else:
        options["mesh"] = DeviceMesh("cpu", [[0, 1]]) if other else None
    with pytest.raises(fxshard.AgreementError) as caught:
        fxshard.compile(model, **options)
    assert not fxshard.is_compiled(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("buffers", "rank 0 has 'buffer table (3,) torch.float32', rank 1 has 'buffer table (4,) torch.float32'"),
        ("init", "rank 0 has 'init not given', rank 1 has 'init given'"),
        ("mesh", "rank 0 has 'mesh None', rank 1 has 'mesh [[0, 1]]'"),
    ],
)
def test_what_would_hang_a_collective_is_compared_before(ranks: Ranks, what: str, text: str) -> None:
    assert all(text in answer for answer in ranks.run(2, differs, what))


def wrong_factor(F: int) -> str:
    model = Blocks()
    with pytest.raises(ValueError) as caught:
        fxshard.compile(model, F)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("F", [0, 2, -1, 6])
def test_wrong_factors_name_the_allowed_ones(ranks: Ranks, F: int) -> None:
    for text in ranks.run(3, wrong_factor, F):
        assert f"F={F}" in text and "allowed are 1, 3" in text


def two_models() -> list[float]:
    """Two different models in one process group; rank 1 comes late to the second one's first call."""
    losses = []
    for width in (8, 12):
        torch.manual_seed(width)
        model = Blocks(width=width)
        fxshard.compile(model, 2, timeout_s=20.0)
        if width == 12 and dist.get_rank() == 1:
            time.sleep(1.0)
        loss = model(torch.ones(2, width))
        loss.backward()
        losses.append(float(loss))
    return losses


def test_a_second_model_does_not_read_the_answers_of_the_first(ranks: Ranks) -> None:
    first, second = ranks.run(2, two_models)
    assert first == second


def rows_out_of_order() -> str:
    mesh = DeviceMesh("cpu", [[1, 0]])
    with pytest.raises(ValueError) as caught:
        fxshard.compile(Blocks(), mesh=mesh)
    return str(caught.value)


def test_a_mesh_whose_ranks_do_not_ascend_is_refused(ranks: Ranks) -> None:
    assert all("ascend" in text for text in ranks.run(2, rows_out_of_order))
