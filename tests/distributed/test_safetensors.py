"""safetensors: no rank reads more than its rows, and what does not fit is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fxshard
from examples.models import GPT
from fxshard import checkpoint
from fxshard.checkpoint.hugging_face import _read
from fxshard.ir.layout import FlatParameter, ParameterSpec
from tests.distributed.harness import RankFailure, Ranks
from tests.distributed.test_checkpoint import Odd, unlike, whole
from tests.distributed.test_whole_state_dicts import CONFIG, beside


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, whole, ties under each of their names."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {name: whole(held[name].detach()) for name in model.state_dict(keep_vars=True)}


def odd(folder: str, F: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = fxshard.compile(Odd(), F, units=[nn.Linear, nn.Embedding])
    if seed == 0:
        checkpoint.save_safetensors(model, folder, max_shard_bytes=300)
    else:
        checkpoint.load_safetensors(model, folder)
    return tensors(model)


def test_odd_sizes_on_any_world(ranks: Ranks, tmp_path: Path) -> None:
    """Sizes 0, 1, 5, 7, no dims, channels_last, a tie: from three ranks to others, and files that the library reads."""
    saved = ranks.run(3, odd, str(tmp_path), 3, 0)[0]
    held = {n: v for path in tmp_path.glob("*.safetensors") for n, v in load_file(path).items()}
    assert unlike({n: v.contiguous() for n, v in saved.items() if n != "head.weight"}, held) == []
    for W, F in ((2, 2), (4, 2)):
        for loaded in ranks.run(W, odd, str(tmp_path), F, 1 + W):
            assert unlike(saved, loaded) == []


def read(folder: str) -> dict[str, Any]:
    """What this rank holds at most, beside its shards, while it saves and loads."""
    torch.manual_seed(0)
    model = fxshard.compile(GPT(CONFIG))
    flats = [p.binding.owner().flat for p in model.parameters()]
    expected, shards = tensors(model), [p.local for p in model.parameters()]
    with beside(shards) as made:
        checkpoint.save_safetensors(model, folder, max_shard_bytes=100_000)
    seen: dict[str, Any] = {"saved": made.peak, "unit": max(f.padded_numel * 4 for f in flats)}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with beside(shards) as made:
        checkpoint.load_safetensors(model, folder)
    seen["loaded"] = made.peak
    seen["parameter"] = max(p.numel() * 4 for p in model.parameters())
    seen["whole"] = sum(v.nbytes for n, v in expected.items())
    seen["wrong"] = unlike(expected, tensors(model))
    return seen


def test_a_rank_holds_its_rows_only(ranks: Ranks, tmp_path: Path) -> None:
    small = 16 * 1024
    for rank, seen in enumerate(ranks.run(4, read, str(tmp_path))):
        assert seen["wrong"] == []
        assert 3 * seen["unit"] < seen["whole"]
        assert seen["saved"] <= (seen["unit"] + seen["parameter"] if rank == 0 else 0) + small
        assert seen["loaded"] <= seen["parameter"] / 2 + small


class Rows:
    """A file that counts what is asked of it."""

    def __init__(self, file: Any) -> None:
        self.file, self.read = file, 0

    def get_tensor(self, name: str) -> Tensor:
        return self._counted(self.file.get_tensor(name))

    def get_slice(self, name: str) -> Rows:
        rows = Rows(self.file.get_slice(name))
        rows._counted = self._counted  # type: ignore[method-assign]
        return rows

    def __getitem__(self, index: Any) -> Tensor:
        return self._counted(self.file[index])

    def _counted(self, value: Tensor) -> Tensor:
        self.read += value.numel()
        return value


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_rows_are_those_of_the_storage(tmp_path: Path, layout: str) -> None:
    """Every rank of every F reads no more than two rows beside its piece, whatever dim its storage has outermost."""
    weight = torch.arange(7 * 3 * 2 * 5.0).reshape(7, 3, 2, 5)
    stride = {"contiguous": weight.stride(), "channels_last": (30, 1, 15, 3), "transposed": (1, 70, 35, 7)}[layout]
    row = 70 if layout == "transposed" else 30
    save_file({"w": weight}, tmp_path / "x.safetensors")
    spec = ParameterSpec("w", tuple(weight.shape), stride, torch.float32, True)
    stored = torch.empty_strided(weight.shape, stride).copy_(weight).as_strided((210,), (1,))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        for F in (1, 2, 3, 8):
            flat = FlatParameter.build("w", "w", False, (spec,), F)
            for rank in range(F):
                (piece,) = flat.pieces(rank)
                rows = Rows(file)
                assert torch.equal(_read(rows, "w", spec, piece), stored[piece.start :][: piece.length])
                assert rows.read <= piece.length + 2 * row
                assert rows.read < 210 or F == 1 or row == 70


# -- what is wrong is told


def loads(folder: str, strict: bool) -> tuple[Any, list[str]]:
    torch.manual_seed(1)
    model = fxshard.compile(Odd(), units="none")
    before = tensors(model)
    return checkpoint.load_safetensors(model, folder, strict), unlike(before, tensors(model))


def test_all_that_does_not_fit_is_listed(ranks: Ranks, tmp_path: Path) -> None:
    held = {n: v.contiguous() for n, v in Odd().state_dict().items() if n != "head.weight"}
    more = {n: v for n, v in held.items() if n not in ("first.bias", "second.weight")} | {"a": held["scale"].clone()}
    save_file(more, tmp_path / "model.safetensors")
    with pytest.raises(RankFailure) as told:
        ranks.run(2, loads, str(tmp_path), True)
    assert sorted(told.value.texts) == [0, 1]
    for text in told.value.texts.values():
        assert f"what is in '{tmp_path}' does not fit this Odd" in text
        assert "  missing     first.bias\n  missing     second.weight\n  unexpected  a\n" in text
    for result, changed in ranks.run(2, loads, str(tmp_path), False):
        assert result == (["first.bias", "second.weight"], ["a"])
        assert changed
        assert not {"first.bias", "second.weight"} & set(changed)
    save_file(held | {"second.weight": torch.zeros(2, 6), "scale": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RankFailure, match=r"misshapen   scale is \(1,\) there and \(\) here") as told:
        ranks.run(2, loads, str(tmp_path), False)
    assert "misshapen   second.weight is (2, 6) there and (1, 6) here" in str(told.value)


def fails_to_write(folder: str) -> str:
    model = fxshard.compile(GPT(CONFIG))
    if dist.get_rank() == 0:
        (Path(folder) / "model-00001-of-00003.safetensors.incomplete").mkdir(parents=True)
    dist.barrier()
    try:
        checkpoint.save_safetensors(model, folder, max_shard_bytes=100_000)
    except (OSError, RuntimeError) as error:
        assert model.state_dict()
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_rank_0_fails_at_is_told_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, fails_to_write, str(tmp_path))
    assert "IsADirectoryError" in first
    assert "save_safetensors failed on 1 of 2 ranks" in second and "IsADirectoryError" in second


def test_bad_sources_and_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fxshard.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), F=2)
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor .*no other"):
        checkpoint.load_safetensors(model, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no such file: .*/a'.*/b'"):
        checkpoint.load_safetensors(model, [tmp_path / "a", tmp_path / "b"])
    full = checkpoint.full_state_dict(model)
    save_file(full, tmp_path / "a")
    save_file({"1.bias": full["1.bias"]}, tmp_path / "b")
    with pytest.raises(ValueError, match=r"in more than one file: 1\.bias \(a, b\)"):
        checkpoint.load_safetensors(model, [tmp_path / "a", tmp_path / "b"])
    assert checkpoint.load_safetensors(model, tmp_path / "a") == ([], [])
    save_file(full | {"1.bias": torch.ones(2, dtype=torch.int8)}, tmp_path / "a")
    with pytest.raises(
        ValueError, match=r"only floating dtypes are cast.*\n  1\.bias is I8 there and torch.float32 here"
    ):
        checkpoint.load_safetensors(model, tmp_path / "a")
    for wrong in (0, 1.5, True, "5GB"):
        with pytest.raises(ValueError, match="max_shard_bytes"):
            checkpoint.save_safetensors(model, tmp_path / "c", max_shard_bytes=wrong)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install safetensors"):
        checkpoint.load_safetensors(model, tmp_path / "a")


def test_several_values_for_one_parameter_are_refused(tmp_path: Path) -> None:
    plain = Odd()
    state = {n: v.clone().contiguous() for n, v in plain.state_dict().items()}
    save_file(state, tmp_path / "same")
    save_file(state | {"head.weight": state["head.weight"] + 1}, tmp_path / "other")
    model = fxshard.compile(Odd(), F=2, units="none")
    before = tensors(model)
    with pytest.raises(ValueError, match=r"one parameter here has several values there\n  embed\.weight, head\.weight"):
        checkpoint.load_safetensors(model, tmp_path / "other")
    assert unlike(before, tensors(model)) == []
    checkpoint.load_safetensors(model, tmp_path / "same")
    assert torch.equal(whole(model.head.weight), state["head.weight"])
