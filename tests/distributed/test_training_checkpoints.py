"""Training checkpoints: bit-equal in any world, whatever state there is; what is finished stays loadable through any kill."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard import checkpoint
from fxshard.errors import AgreementError
from tests.capture.compare import Framed, batches
from tests.distributed.harness import RankFailure, Ranks
from tests.distributed.test_checkpoint import Odd, batch, everything, unlike


class Partly(Odd):
    """A layer that no loss reaches, beside the sizes and the frozen weight of `Odd`."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 2)


def trained(F: int | None, steps: int, seed: int = 0, units: Any = (nn.Linear, nn.Embedding)) -> Any:
    """A model and an optimizer of two groups, the second with a learning rate of its own that falls."""
    torch.manual_seed(seed)
    model = fxshard.compile(Partly(), F, units=list(units) if isinstance(units, tuple) else units)
    slow = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": slow, "lr": 0.5}], lr=0.01)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for number in range(steps):
        train(model, optimizer, number, rank)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    model(*batch(number, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[1]["lr"] *= 0.5


def found(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[str]]:
    """All values, the groups, and the names of the parameters that have state."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return everything(model, optimizer), groups, [n for n, p in model.named_parameters() if optimizer.state.get(p)]


def save(folder: str, F: int, steps: int) -> Any:
    model, optimizer = trained(F, steps)
    checkpoint.save(folder, model, optimizer, step=steps, position=[steps, "tokens"], scores=torch.ones(3))
    return found(model, optimizer)


def load(folder: str, F: int | None, units: Any) -> Any:
    model, optimizer = trained(F, 0, seed=3, units=units)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the random states of")
        extra = checkpoint.load(folder, model, optimizer)
    assert extra.pop("scores").tolist() == [1, 1, 1]
    return extra, found(model, optimizer)


def check(expected: Any, loaded: Any, steps: int) -> None:
    extra, (values, groups, with_state) = loaded
    assert extra == {"step": steps, "position": [steps, "tokens"]}
    assert unlike(expected[0], values) == []
    assert (groups, with_state) == expected[1:]
    assert groups[1]["lr"] == 0.5 ** (steps + 1)
    unused = {"spare.weight", "spare.bias", "first.bias"}
    assert set(with_state) == ({n for n, _ in Partly().named_parameters()} - unused if steps else set())


@pytest.mark.full
@pytest.mark.parametrize(("W", "F", "steps"), [(4, 2, 2), (4, 4, 2), (3, 1, 1), (1, 1, 3), (2, 2, 0)])
def test_saved_anywhere_loads_anywhere(ranks: Ranks, tmp_path: Path, W: int, F: int, steps: int) -> None:
    """Bit-equal on 1 to 4 ranks with other F and units, and in virtual worlds of 1, 3 and 8 shards."""
    folder = str(tmp_path)
    expected = ranks.run(W, save, folder, F, steps)[0]
    for V, G, units in ((1, 1, "none"), (2, 2, (nn.Linear,)), (3, 3, (nn.Linear, nn.Embedding)), (4, 2, "none")):
        for loaded in ranks.run(V, load, folder, G, units):
            check(expected, loaded, steps)
    for G in (1, 3, 8):
        check(expected, load(folder, G, (nn.Linear,)), steps)


def test_saved_on_three_ranks_loads_on_two(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(3, save, str(tmp_path), 3, 2)[0]
    for loaded in ranks.run(2, load, str(tmp_path), 2, "none"):
        check(expected, loaded, 2)


def test_saved_in_a_virtual_world_loads_on_ranks(ranks: Ranks, tmp_path: Path) -> None:
    expected = save(str(tmp_path), 8, 2)
    for loaded in ranks.run(3, load, str(tmp_path), 3, "none"):
        check(expected, loaded, 2)


def test_pieces_are_read_by_any_reader(ranks: Ranks, tmp_path: Path) -> None:
    """A plain process reads whole tensors of what three ranks wrote as they held it."""
    values, _, _ = ranks.run(3, save, str(tmp_path), 3, 1)[0]
    values["head.weight"] = values["embed.weight"]
    plain = Partly().state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({"model": plain}, checkpoint_id=str(tmp_path / "step-00000001"), no_dist=True)
    assert [n for n, v in plain.items() if not torch.equal(v, values[n])] == []


def test_parts_that_rank_0_does_not_see_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each host has a disk of its own."""
    model, optimizer = trained(2, 1)
    write = dcp.save

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        next(iter(tmp_path.glob("*/__0_0.distcp"))).unlink()

    monkeypatch.setattr(dcp, "save", elsewhere)
    with pytest.raises(RuntimeError, match=r"__0_0\.distcp of other ranks are not in .* one that all ranks share"):
        checkpoint.save(tmp_path, model, optimizer, step=1)
    assert checkpoint.latest(tmp_path) is None


class Made(TorchDispatchMode):
    """Where operators put results of a size."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes, self.places = num_bytes, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is Tensor and out.nbytes >= self.num_bytes:
            self.places.append(out.data_ptr())
        return out


def save_and_watch(folder: str) -> tuple[int, list[int]]:
    """How many tensors of a weight's size were looked at, and those that are not where pieces are."""
    model = fxshard.compile(nn.Sequential(*(nn.Linear(256, 256) for _ in range(2))))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    held: list[Any] = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if v.dim())]
    with Made(100_000) as made:
        checkpoint.save(folder, model, optimizer, step=1)
    inside = [(p.local.data_ptr(), p.local.data_ptr() + p.local.nbytes) for p in held]
    return len(made.places), [at for at in made.places if not any(a <= at < b for a, b in inside)]


def test_a_save_copies_no_shard(ranks: Ranks, tmp_path: Path) -> None:
    for number, elsewhere in ranks.run(2, save_and_watch, str(tmp_path)):
        assert number >= 2 * 3 and elsewhere == []


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_goes_on_as_if_nothing_had_been(tmp_path: Path, make: Callable[..., Any], steps: int) -> None:
    """From a checkpoint of step 0 too, into another F, on from a meta device, and saved again before a step."""

    def build(F: int, meta: bool = False) -> tuple[Any, Any]:
        torch.manual_seed(0)
        with torch.device("meta" if meta else "cpu"):
            plain = Framed()
        model = fxshard.compile(plain, F=F, init=(lambda module: None) if meta else None)
        return model, make(model.parameters(), lr=0.01)

    def go(model: Any, optimizer: Any, first: int, last: int) -> None:
        for x in batches(4)[first:last]:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, whole_optimizer = build(2)
    go(whole, whole_optimizer, 0, steps)
    checkpoint.save(tmp_path / "a", whole, whole_optimizer, step=steps)
    go(whole, whole_optimizer, steps, 4)
    middle = build(3, meta=True)
    checkpoint.load(tmp_path / "a", *middle)
    checkpoint.save(tmp_path / "b", *middle, step=steps)
    last = build(1, meta=True)
    checkpoint.load(tmp_path / "b", *last)
    for model, optimizer in (middle, last):
        go(model, optimizer, steps, 4)
        assert unlike(everything(whole, whole_optimizer), everything(model, optimizer)) == []


def test_frozen_after_training_keeps_its_state(tmp_path: Path) -> None:
    model, optimizer = trained(2, 1)
    model.second.weight.requires_grad_(False)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    other = trained(3, 0, seed=1)
    checkpoint.load(tmp_path, *other)
    assert unlike(everything(model, optimizer), everything(*other)) == []
    assert other[1].state[other[0].second.weight]["step"] == 1


def test_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(2, 1)
    checkpoint.save(tmp_path / "with", model, optimizer, step=1)
    checkpoint.save(tmp_path / "without", model, step=1)
    for folder in ("with", "without"):
        other, _ = trained(3, 0, seed=1)
        assert checkpoint.load(tmp_path / folder, other) == {"step": 1}
        assert (
            unlike({n: v for n, v in found(model, optimizer)[0].items() if "/" not in n}, everything(other, optimizer))
            == []
        )
    with pytest.raises(ValueError, match="was saved without an optimizer"):
        checkpoint.load(tmp_path / "without", *trained(2, 0))


def test_a_forward_from_before_a_load_has_no_backward(tmp_path: Path) -> None:
    model, optimizer = trained(2, 1)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    loss = model(*batch(1, 0))
    checkpoint.load(tmp_path, model, optimizer)
    with pytest.raises(RuntimeError, match="parameters changed between forward and backward"):
        loss.backward()


def draws(folder: str) -> tuple[list[float], list[float]]:
    """What this rank draws after a save, and after a load of it."""
    model, _ = trained(None, 0)
    torch.manual_seed(100 + dist.get_rank())
    torch.rand(3)
    checkpoint.save(folder, model, step=1)
    drawn = torch.rand(3).tolist()
    checkpoint.load(folder, model)
    return drawn, torch.rand(3).tolist()


def warned(folder: str) -> list[str]:
    model, _ = trained(None, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpoint.load(folder, model)
    return [str(w.message) for w in told]


def test_random_states_of_as_many_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (first, second) = ranks.run(2, draws, str(tmp_path))
    assert first[0] == first[1] != second[0] == second[1]
    told = ranks.run(3, warned, str(tmp_path))
    assert len(told[0]) == 1 and "of 2 processes are not restored in 3" in told[0][0]
    assert told[1:] == [[], []]


# -- on disk


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_stays_and_what_goes(tmp_path: Path) -> None:
    model, _ = trained(2, 0)
    assert checkpoint.latest(tmp_path / "nothing") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 10):
        folder = checkpoint.save(tmp_path, model, step=step, keep=2)
        assert folder == checkpoint.latest(tmp_path) == tmp_path / f"step-{step:08d}"
    assert names(tmp_path) == ["step-00000002", "step-00000010"]
    (tmp_path / "step-00000099.tmp-0123abcd").mkdir()
    (tmp_path / "step-00000099.tmp-0123abcd" / "plain.pt").write_text("half")
    (tmp_path / "step-00000001.tmp-removed").mkdir()
    (tmp_path / "log.txt").write_text("the user's")
    (tmp_path / "step-00000100").write_text("no folder")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000010"
    again = checkpoint.save(tmp_path, model, step=10, note="again")
    assert checkpoint.latest(tmp_path) == again
    assert names(tmp_path) == ["log.txt", "step-00000002", "step-00000010.1", "step-00000100"]
    assert checkpoint.load(tmp_path, model) == {"step": 10, "note": "again"}
    assert checkpoint.load(tmp_path / "step-00000002", model) == {"step": 2}
    with pytest.raises(ValueError, match=r"has step-00000010, later than step 9"):
        checkpoint.save(tmp_path, model, step=9)


def disagreeing(folder: Path) -> list[str]:
    """What calls say whose arguments are not those of the other rank; and whether a call with the same ones still works."""
    first = dist.get_rank() == 0
    model, optimizer = trained(2, 1)
    checkpoint.save(folder, model, optimizer, step=1)
    whole = checkpoint.full_state_dict(model) or None
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.save(folder, model, optimizer if first else None, step=2),
        lambda: checkpoint.save(folder, model, optimizer, step=2 + dist.get_rank()),
        lambda: checkpoint.load(folder, model, optimizer if first else None),
        lambda: checkpoint.load_full_state_dict(model, whole, strict=first),
    ]
    told = []
    for call in calls:
        try:
            call()
        except AgreementError as error:
            told.append(str(error))
    return [*told, checkpoint.load(folder, model, optimizer)["step"]]


def test_ranks_that_give_different_arguments_are_told(ranks: Ranks, tmp_path: Path) -> None:
    for *told, step in ranks.run(2, disagreeing, tmp_path):
        assert step == 1
        assert "rank 0: step=2, keep=None, optimizer='AdamW'\n  rank 1: step=2, keep=None, optimizer=None" in told[0]
        assert "rank 0: step=2," in told[1] and "rank 1: step=3," in told[1]
        assert "rank 0: optimizer='AdamW'\n  rank 1: optimizer=None" in told[2]
        assert "load_full_state_dict: " in told[3] and "rank 1: strict=False" in told[3]
        assert len(told) == 4


def out_of_space(folder: Path, rank: int) -> str:
    """A save during which this rank's disk is full; what every rank is told."""
    model, optimizer = trained(2, 1)
    fsync = os.fsync

    def full(file: int) -> None:
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        fsync(file)

    os.fsync = full
    try:
        checkpoint.save(folder, model, optimizer, step=1)
    except RuntimeError as error:
        return str(error)
    finally:
        os.fsync = fsync
    return "saved"


def test_a_full_disk_is_told_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, out_of_space, tmp_path, 1)
    assert all("saving a checkpoint failed on 1 ranks\nrank 1: OSError: [Errno 28]" in text for text in told), told


@pytest.mark.parametrize("keep", [0, 100])
def test_a_file_cut_short_is_no_checkpoint(tmp_path: Path, keep: int) -> None:
    model, optimizer = trained(2, 1)
    folder = checkpoint.save(tmp_path, model, optimizer, step=1)
    (file,) = folder.glob("*.distcp")
    os.truncate(file, keep)
    with pytest.raises(RuntimeError, match=r"loading a checkpoint failed on 1 ranks\nrank 0: "):
        checkpoint.load(tmp_path, *trained(2, 0))


class Killed(BaseException):
    pass


def killed(call: Callable[[], Any]) -> bool:
    """Whether `Killed` ended the call; what is raised while files are written is told to all ranks."""
    try:
        call()
    except Killed:
        return True
    except RuntimeError as error:
        return "Killed" in str(error)
    return False


@pytest.mark.parametrize("keep", [1, None])
@pytest.mark.parametrize("step", [1, 2], ids=["same-step", "next-step"])
def test_a_save_cut_anywhere_leaves_one_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int | None, step: int
) -> None:
    """From the n-th change of a folder or fsync on nothing more happens, for every n: one of both saves loads, whole."""
    changes = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
    model, optimizer = trained(2, 1)
    left = -1  # changes still to come; negative: no end

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return call(*args, **kwargs)

        return change

    for name in changes:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    cuts, new = 0, 0
    while True:
        folder = tmp_path / str(cuts)
        left = -1
        checkpoint.save(folder, model, optimizer, step=1, note="old")
        old = found(model, optimizer)
        with torch.no_grad():
            model.scale.add_(1)
        left = cuts
        ended = not killed(lambda at=folder: checkpoint.save(at, model, optimizer, step=step, keep=keep, note="new"))
        left = -1
        other = trained(3, 0, seed=1)
        note = checkpoint.load(folder, *other)["note"]
        expected = old if note == "old" else found(model, optimizer)
        assert unlike(expected[0], found(*other)[0]) == []
        new += note == "new"
        checkpoint.save(folder, model, optimizer, step=3)
        assert not any(".tmp-" in name for name in names(folder))
        if ended:
            break
        cuts += 1
    assert note == "new"
    assert cuts >= 8 and 1 < new <= cuts


# -- what is wrong is told


def test_bad_requests(tmp_path: Path) -> None:
    model, optimizer = trained(2, 1)
    with pytest.raises(FileNotFoundError, match=f"no finished checkpoint in '{tmp_path}'; there is nothing"):
        checkpoint.load(tmp_path, model)
    for wrong in (-1, 1.0, True, None):
        with pytest.raises(ValueError, match="number of steps done"):
            checkpoint.save(tmp_path, model, step=wrong)  # type: ignore[arg-type]
    for wrong in (0, "all", True):
        with pytest.raises(ValueError, match="how many checkpoints stay"):
            checkpoint.save(tmp_path, model, step=1, keep=wrong)  # type: ignore[arg-type]
    for odd in (Killed(), lambda: 1, {"a": [Path("x")]}):
        with pytest.raises(TypeError, match="extra 'odd' is not made of plain values"):
            checkpoint.save(tmp_path, model, step=1, odd=odd, fine=3)
    with pytest.raises(ValueError, match=r"not the model's: one of shape \(3,\) in group 0"):
        checkpoint.save(tmp_path, model, torch.optim.SGD([torch.zeros(3)]), step=1)
    assert names(tmp_path) == []
    checkpoint.save(tmp_path, model, optimizer, step=1)
    with pytest.raises(ValueError, match="has the state of AdamW, and this is SGD"):
        checkpoint.load(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"2 groups there and 1 here\n  group 0 has conv\.bias here only"):
        checkpoint.load(tmp_path, model, torch.optim.AdamW(model.parameters()))
    plain = Odd()
    plain.second = nn.Linear(6, 3)
    other = fxshard.compile(plain, F=2, units="none")
    with pytest.raises(ValueError, match="does not fit this Odd") as told:
        checkpoint.load(tmp_path, other)
    for line in ("misshapen   second.bias is (1,) there and (3,) here", "unexpected  spare.bias"):
        assert line in str(told.value)


def test_other_ties_are_refused(tmp_path: Path) -> None:
    def model(tied: bool) -> Any:
        plain = Odd()
        if not tied:
            plain.head.weight = nn.Parameter(torch.randn(7, 6))
        return fxshard.compile(plain, F=2, units="none")

    checkpoint.save(tmp_path, model(False), step=1)
    with pytest.raises(
        ValueError, match=r"other parameters are tied .*\[\] there, \[\['embed.weight', 'head.weight'\]\]"
    ):
        checkpoint.load(tmp_path, model(True))


def fails_on_one(folder: str) -> None:
    model, optimizer = trained(None, 0)
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    checkpoint.save(folder, model, optimizer, step=1)


def test_what_one_rank_fails_at_is_told_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as told:
        ranks.run(3, fails_on_one, str(tmp_path))
    assert "saving a checkpoint failed on 1 of 3 ranks\nrank 1: ValueError" in told.value.texts[0]
    assert "not the model's: one of shape (2,) in group 2" in told.value.texts[1]
    assert names(tmp_path) == []


class Fails(nn.Module):
    """Its state dict cannot be made, or loaded, on rank 1."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def get_extra_state(self) -> int:
        if self.when == "made" and dist.get_rank() == 1:
            raise KeyError("a state dict that is made")
        return 1

    def set_extra_state(self, state: int) -> None:
        if self.when == "loaded" and dist.get_rank() == 1:
            raise KeyError("a state dict that is loaded")


def calls_with(model: nn.Module, folder: str) -> dict[str, Callable[[], Any]]:
    whole = Fails("").state_dict() if dist.get_rank() == 0 else None
    return {
        "save": lambda: checkpoint.save(folder, model, step=1),
        "load": lambda: checkpoint.load(folder, model),
        "full_state_dict": lambda: checkpoint.full_state_dict(model),
        "stream_state_dict": lambda: checkpoint.stream_state_dict(model),
        "load_full_state_dict": lambda: checkpoint.load_full_state_dict(model, whole),
        "load_safetensors": lambda: checkpoint.load_safetensors(model, folder),
        "save_safetensors": lambda: checkpoint.save_safetensors(model, folder),
    }


def failing_in_extra_state(folder: str) -> dict[str, str]:
    """What each function raises on this rank."""
    models = {when: fxshard.compile(Fails(when), units="none") for when in ("never", "made", "loaded")}
    calls_with(models["never"], folder)["save"]()
    told = {}
    for when, model in models.items():
        for name, call in calls_with(model, folder).items():
            if when == "made" or (when == "loaded" and name in ("load", "load_full_state_dict")):
                try:
                    call()
                except Exception as error:
                    told[f"{name} {when}"] = f"{type(error).__name__}: {error}"
    return told


def test_what_a_models_own_state_fails_at_is_told_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    first, second, third = ranks.run(3, failing_in_extra_state, str(tmp_path), timeout_s=60.0)
    assert len(first) == 9 and first.keys() == second.keys() and first == third
    for name, text in second.items():
        assert text == f"KeyError: 'a state dict that is {name.split()[1]}'"
        assert first[name].startswith("RuntimeError: ") and "failed on 1 of 3 ranks\nrank 1: " + text in first[name]


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    class Adds(nn.Linear):
        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "format"] = "mine"

    model = fxshard.compile(nn.Sequential(Adds(3, 3)), F=2, units="none")
    with pytest.raises(ValueError, match=r"Sequential has '0\.format', neither parameters nor buffers nor extra state"):
        checkpoint.save(tmp_path, model, step=1)
    whole = checkpoint.full_state_dict(model)
    assert whole["0.format"] == "mine"
    with pytest.raises(ValueError, match=r"'0\.format', neither"):
        checkpoint.load_full_state_dict(model, whole)
