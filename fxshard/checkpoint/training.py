"""Training checkpoints on disk: a save that is killed at any moment leaves the last finished one, and it loads anywhere.

    folder/step-00000012/                 finished: a name without `.tmp-`
    folder/step-00000016.tmp-1c9f03ab/    being written, or what a killed save left behind

Ranks write their parts, synchronously to the disk, into a folder that no reader looks at; when all are done rank 0 gives it
its name. See [Note: atomic saves] in docs/architecture.md. The parts are torch.distributed.checkpoint's; beside them
`plain.pt` holds what is no tensor of the model's or the optimizer's, and loads with `weights_only`.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fxshard.checkpoint import optimizer as checkpoint_optimizer
from fxshard.checkpoint.contents import Contents
from fxshard.runtime.world import agree, together

PLAIN = "plain.pt"
_FINISHED = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"step-\d{8,}(\.\d+)?\.tmp-.*")

Folder = str | os.PathLike[str]


def save(
    directory: Folder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    keep: int | None = None,
    **extra: Any,
) -> Path:
    """Write a checkpoint of `step` into `directory`, which all ranks see, and return its folder. A collective.

    It holds the model, the optimizer (its state as far as it exists), torch's random states of each rank, and `extra`: plain
    values and tensors, of which rank 0's count. A kill leaves what was finished before; what killed saves left behind
    goes with the next save. keep: how many finished checkpoints stay, all of them if None. Saving a step again replaces it.

    Raises ValueError where `directory` has a later step, or the optimizer parameters of another model; TypeError for an extra
    that `load` would refuse (it unpickles nothing but plain values): on the rank that finds out (rank 0 looks at the
    directory), and RuntimeError on the others; AgreementError where ranks give another `step`, `keep` or kind of optimizer. The
    directory has to be one for all: ranks that do not see rank 0's raise before it counts as finished.
    """
    contents, folder = Contents.of(model, "saving a checkpoint"), Path(directory)
    world = contents.world
    with together(world, "saving a checkpoint"):
        _check(step, keep)
        contents.check_extra_states()
        named = _named(contents, optimizer)
    agree(world, "saving a checkpoint", step=step, keep=keep, optimizer=_kind(optimizer))
    buffers = [contents.world.first_ranks(names[0], buffer) for buffer, names in contents.buffers]
    with together(world, "saving a checkpoint"):
        state, plain = _state(contents, optimizer, named, buffers)
    plain |= {"step": step, "extra": extra, "random": world.gather_objects(_random_states(world.device))}
    names = ("", "")
    with together(world, "saving a checkpoint"):
        if world.is_first:
            _check_loadable(extra, "extra")
            _check_loadable(plain, "what is no tensor of the state of")
            folder.mkdir(parents=True, exist_ok=True)
            names = _prepare(folder, step)
    unfinished, finished = (folder / name for name in world.gather_objects(names)[0])
    with _files("saving a checkpoint"):
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(unfinished, sync_files=True),
            planner=_InPlace(),
            process_group=world.control,
            no_dist=world.control is None,
        )
    with together(world, "saving a checkpoint"):
        if world.is_first:
            _check_written(unfinished)
            with (unfinished / PLAIN).open("wb") as file:
                torch.save(plain, file)
                file.flush()
                os.fsync(file.fileno())
            _sync(unfinished)
            unfinished.rename(finished)
            _sync(folder)
            _clean(folder, keep)
    return finished


@contextlib.contextmanager
def _files(what: str) -> Iterator[None]:
    """Around torch.distributed.checkpoint: what it raises on every rank, and is no Exception, is a RuntimeError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is, in a virtual world
        try:
            yield
        except dcp.CheckpointException as error:
            told = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items())]
            raise RuntimeError(f"{what} failed on {len(told)} ranks\n" + "\n".join(told)) from error


class _InPlace(dcp.DefaultSavePlanner):
    """The writer copies each tensor that is a part of a storage, and holds all copies until its file is closed: three shards
    at once. So it gets tensors whose storage is what they show, of the same memory."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if not isinstance(data, Tensor) or not data.is_cpu or not data.nbytes:
            return data
        memory = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
        return torch.frombuffer(memory, dtype=data.dtype).as_strided(data.size(), data.stride())


def latest(directory: Folder) -> Path | None:
    """The folder of the last finished checkpoint in `directory`; None if there is none."""
    found = _finished(Path(directory))
    return found[-1][1] if found else None


def load(directory: Folder, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Load the last finished checkpoint of `directory`, or one that is named itself, and return its `extra` with its `step`.
    Rank 0's `directory` counts.

    Into any number of ranks, F and units. The optimizer may be new or have stepped; its groups, with the parameters they have,
    get the saved settings and state. torch's random states are restored where as many processes load as saved; else they stay,
    with a warning on rank 0. A collective.

    Pieces are read into the model's own memory. Raises, with nothing loaded, AgreementError where some ranks give an optimizer
    and some do not; FileNotFoundError where no checkpoint is finished (`latest` says so beforehand) and ValueError where
    names, shapes or groups differ, on the rank that finds out, and RuntimeError on the others. Where a file cannot be read
    half way, or the model's or optimizer's own loading fails, the model is half loaded; every rank raises.
    """
    contents = Contents.of(model, "loading a checkpoint")
    world = contents.world
    agree(world, "loading a checkpoint", optimizer=_kind(optimizer))
    found: Path | None = None
    with together(world, "loading a checkpoint"):
        if world.is_first:
            found = _found(Path(directory))
    folder = world.gather_objects(found)[0]
    with together(world, "loading a checkpoint"):
        plain = torch.load(folder / PLAIN, map_location="cpu", weights_only=True)
        tensors = _tensors(folder)
        _check_model(contents, plain, tensors, folder)
        named = _named(contents, optimizer)
        groups = None if optimizer is None else _groups(optimizer, named, plain["optimizer"], folder)
    state = _template(contents, optimizer, tensors)
    with _files("loading a checkpoint"):
        dcp.load(
            state,
            storage_reader=dcp.FileSystemReader(folder),
            process_group=world.control,
            no_dist=world.control is None,
        )
    next(model.parameters()).binding.generation.value += 1  # type: ignore[attr-defined]
    world.buffers_changed(model)
    with together(world, "loading a checkpoint"):
        for name, value in plain["model"].items():
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        if optimizer is not None:
            held = state.get("optimizer", {}).get("state", {})
            numbers = {name: number for number, name in named.items()}
            values = {numbers[n]: others | held.get(n, {}) for n, others in plain["optimizer"]["state"].items()}
            optimizer.load_state_dict({"state": values, "param_groups": groups})
    _restore_random_states(contents, plain["random"])
    return plain["extra"] | {"step": plain["step"]}


# -- folders


def _finished(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """((step, version), folder) of each finished checkpoint, oldest first."""
    matches = [(_FINISHED.fullmatch(p.name), p) for p in (folder.iterdir() if folder.is_dir() else ()) if p.is_dir()]
    return sorted(((int(m[1]), int(m[2] or 0)), path) for m, path in matches if m)


def _found(directory: Path) -> Path:
    if (directory / PLAIN).is_file() and not _UNFINISHED.fullmatch(directory.name):
        return directory
    found = latest(directory)
    if found is None:
        there = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        raise FileNotFoundError(f"no finished checkpoint in '{directory}'; there is {', '.join(there) or 'nothing'}")
    return found


def _prepare(folder: Path, step: int) -> tuple[str, str]:
    """Remove what killed saves left behind; the names of the new checkpoint while it is written and then."""
    finished = [number for number, _ in _finished(folder)]
    if later := [f"step-{number:08d}" for number, _ in finished if number > step]:
        raise ValueError(
            f"'{folder}' has {', '.join(later)}, later than step {step}: `latest` would go on with those. "
            "Remove them, or save into another directory"
        )
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path)
    version = max((v + 1 for number, v in finished if number == step), default=0)
    name = f"step-{step:08d}" + (f".{version}" if version else "")
    return f"{name}.tmp-{uuid.uuid4().hex[:8]}", name


def _check_written(folder: Path) -> None:
    """Raise RuntimeError where files of other ranks are not to be seen from here."""
    entries = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    if missing := sorted({e.relative_path for e in entries if not (folder / e.relative_path).is_file()}):
        raise RuntimeError(
            f"{', '.join(missing)} of other ranks are not in '{folder}' as rank 0 sees it: the directory has to be one that "
            "all ranks share"
        )


def _clean(folder: Path, keep: int | None) -> None:
    """Remove earlier versions of a step, and what is older than the last `keep`."""
    versions = {step: path for (step, _), path in _finished(folder)}
    kept = [versions[step] for step in sorted(versions)][-keep if keep else 0 :]
    for _, path in _finished(folder):
        if path not in kept:
            # Half removed it would look finished.
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.tmp-removed")))


def _sync(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- what is in a checkpoint


def _kind(optimizer: torch.optim.Optimizer | None) -> str | None:
    return None if optimizer is None else type(optimizer).__name__


def _check(step: Any, keep: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step={step!r}: the number of steps done was expected, 0, 1, 2, ...")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep={keep!r}: how many checkpoints stay was expected, 1, 2, ..., or None (all)")


def _check_loadable(values: Mapping[str, Any], what: str) -> None:
    for key, value in values.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise TypeError(
                f"{what} '{key}' is not made of plain values and tensors, which alone are loaded again: {reason}"
            ) from error


def _named(contents: Contents, optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    """The names of an optimizer's parameters by their numbers in its state dict. Raises ValueError for those of no name."""
    if optimizer is None:
        return {}
    checkpoint_optimizer.meet(optimizer)
    names = {id(p): name for name, p in contents.model.named_parameters()}
    parameters = [(g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    foreign = [f"one of shape {tuple(p.shape)} in group {g}" for g, p in parameters if id(p) not in names]
    if foreign:
        raise ValueError(f"the optimizer has parameters that are not the model's: {', '.join(foreign)}")
    return {number: names[id(p)] for number, (_, p) in enumerate(parameters)}


def _state(
    contents: Contents, optimizer: torch.optim.Optimizer | None, named: Mapping[int, str], buffers: Sequence[Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch.distributed.checkpoint writes, and what `plain.pt` holds. Pieces are not copied."""
    held: dict[str, Any] = {
        name: p for s, tied in contents.units for names, p in zip(tied, s.parameters.values()) for name in names
    }
    for value, (_, names) in zip(buffers, contents.buffers):
        held |= dict.fromkeys(names, value)
    state: dict[str, Any] = {"model": {name: held[name] for name in contents.names if name in held}}
    plain: dict[str, Any] = {"model": contents.others, "tied": _tied(contents), "optimizer": None}
    if optimizer is not None:
        whole = checkpoint_optimizer.state_in_pieces(optimizer)
        values = {named[number]: values for number, values in whole["state"].items()}
        tensors = {n: {k: v for k, v in of.items() if isinstance(v, Tensor)} for n, of in values.items()}
        if any(tensors.values()):
            state["optimizer"] = {"state": {name: of for name, of in tensors.items() if of}}
        plain["optimizer"] = {
            "kind": type(optimizer).__name__,
            "groups": [{**g, "params": [named[number] for number in g["params"]]} for g in whole["param_groups"]],
            "state": {n: {k: v for k, v in of.items() if k not in tensors[n]} for n, of in values.items()},
        }
    return state, plain


def _tied(contents: Contents) -> list[list[str]]:
    return sorted(sorted(names) for _, tied in contents.units for names in tied if len(names) > 1)


def _tensors(folder: Path) -> dict[tuple[str, ...], Any]:
    """The sizes and dtypes of the tensors in a checkpoint: ("model", name), ("optimizer", "state", name, key)."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {path: metadata.state_dict_metadata[flat] for flat, path in metadata.planner_data.items()}


def _check_model(contents: Contents, plain: Mapping[str, Any], tensors: Mapping[Any, Any], folder: Path) -> None:
    shapes: dict[str, Any] = {path[1]: tuple(entry.size) for path, entry in tensors.items() if path[0] == "model"}
    contents.compare(shapes | dict.fromkeys(plain["model"], ()), f"'{folder}'", strict=True, can_relax=False)
    if plain["tied"] != _tied(contents):
        raise ValueError(f"other parameters are tied in '{folder}': {plain['tied']} there, {_tied(contents)} here")


def _groups(
    optimizer: torch.optim.Optimizer, named: Mapping[int, str], saved: Mapping[str, Any] | None, folder: Path
) -> list[dict[str, Any]]:
    """The saved parameter groups with the numbers that their parameters have now."""
    if saved is None:
        raise ValueError(f"'{folder}' was saved without an optimizer; load it without one")
    if saved["kind"] != type(optimizer).__name__:
        raise ValueError(f"'{folder}' has the state of {saved['kind']}, and this is {type(optimizer).__name__}")
    numbers, groups, wrong = iter(named.items()), [], []
    for group in optimizer.param_groups:
        groups.append(dict(next(numbers) for _ in group["params"]))
    theirs, ours = [set(g["params"]) for g in saved["groups"]], [set(g.values()) for g in groups]
    if len(theirs) != len(ours):
        wrong.append(f"  {len(theirs)} groups there and {len(ours)} here")
    for i, (there, here) in enumerate(zip(theirs, ours)):
        wrong += [f"  group {i} has {name} there only" for name in sorted(there - here)]
        wrong += [f"  group {i} has {name} here only" for name in sorted(here - there)]
    if wrong:
        raise ValueError(f"the optimizer's groups are not those of '{folder}'\n" + "\n".join(wrong))
    return [{**old, "params": list(new)} for old, new in zip(saved["groups"], groups)]


def _template(
    contents: Contents, optimizer: torch.optim.Optimizer | None, tensors: Mapping[tuple[str, ...], Any]
) -> dict[str, Any]:
    """What a checkpoint is read into: the model's own pieces and buffers, and new pieces of the optimizer's state."""
    model: dict[str, Any] = {
        _first(names, tensors): p
        for s, tied in contents.units
        for names, p in zip(tied, s.parameters.values())
        if names
    }
    model |= {_first(names, tensors): buffer for buffer, names in contents.buffers}
    state: dict[str, Any] = {"model": model}
    parameters: dict[str, Any] = dict(contents.model.named_parameters())
    for path, entry in tensors.items():
        if path[0] != "optimizer" or optimizer is None:
            continue
        _, _, name, key = path
        dtype, parameter = entry.properties.dtype, parameters[name]
        if entry.size == parameter.shape and entry.size:
            value = parameter.like(torch.zeros_like(parameter.local, dtype=dtype), state=True)
        else:
            value = torch.empty(entry.size, dtype=dtype)
        state.setdefault("optimizer", {"state": {}})["state"].setdefault(name, {})[key] = value
    return state


def _first(names: list[str], tensors: Mapping[tuple[str, ...], Any]) -> str:
    return next(name for name in names if ("model", name) in tensors)


# -- random states


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(contents: Contents, saved: list[dict[str, Tensor]]) -> None:
    group = contents.world.control
    rank, processes = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if len(saved) != processes:
        if rank == 0:
            warnings.warn(
                f"the random states of {len(saved)} processes are not restored in {processes}: each goes on with its own",
                stacklevel=3,
            )
        return
    torch.set_rng_state(saved[rank]["cpu"])
    if "cuda" in saved[rank] and contents.world.device.type == "cuda":
        torch.cuda.set_rng_state(saved[rank]["cuda"], contents.world.device)
