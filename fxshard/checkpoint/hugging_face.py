"""safetensors files in the layout of transformers' `save_pretrained`: read row by row, written unit by unit.

The library reads them. It writes a file only from all tensors of the file at once, so files are written here: a header that
names all tensors of the file with their places, then each tensor at its place when its unit comes.
Source: the format's description in the safetensors README.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxshard.checkpoint.contents import Contents, Incompatible
from fxshard.checkpoint.whole import streamed
from fxshard.ir.layout import storage_order
from fxshard.runtime.world import agree, together

if TYPE_CHECKING:
    from fxshard.ir.layout import ParameterSpec, Piece

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.incomplete)?")

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What the format calls the dtypes that it has."""


# -- reading


def load_safetensors(
    model: nn.Module, source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], strict: bool = True
) -> Incompatible:
    """Load the weights of a plain model from safetensors files; each rank reads the rows that its pieces lie in.

    source: a folder as `save_pretrained` and `save_safetensors` write it, a file, or files. Floating values are cast to
    the dtypes here; of tied names one is enough, and where there are more those of a parameter hold the same, of a buffer the
    first counts. Every rank calls it and sees the files.

    Such files hold no extra state: that stays as it is. Returns what is missing and unexpected. Raises, with nothing loaded,
    ValueError that lists all that is missing or unexpected (if `strict`) or does not fit in shape or kind, FileNotFoundError,
    what the safetensors library says of a file that is none, and ImportError without that library.
    """
    contents = Contents.of(model, "load_safetensors")
    agree(contents.world, "load_safetensors", strict=strict)
    with together(contents.world, "load_safetensors"), contextlib.ExitStack() as opened:
        files = _open(source, opened)
        found = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 (no mapping)
        _check_once(files)
        shapes = {name: file.get_slice(name).get_shape() for name, file in found.items()}
        shapes.update(dict.fromkeys(contents.others, ()))  # no tensors, so in no such file
        where = f"'{source}'" if isinstance(source, (str, os.PathLike)) else f"{len(files)} files"
        result = contents.compare(shapes, f"what is in {where}", strict)
        _check_kinds(contents, found)
        _check_tied(contents, found)
        _load(contents, found)
    contents.world.buffers_changed(model)
    return result


def _open(source: Any, opened: contextlib.ExitStack) -> dict[Path, Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "load_safetensors needs the safetensors library, which is not installed: pip install safetensors"
        ) from error
    return {path: opened.enter_context(safe_open(path, framework="pt")) for path in _files(source)}


def _files(source: Any) -> list[Path]:
    paths = [Path(source)] if isinstance(source, (str, os.PathLike)) else [Path(path) for path in source]
    if len(paths) == 1 and paths[0].is_dir():
        folder = paths[0]
        if (folder / SINGLE).exists():
            paths = [folder / SINGLE]
        elif (folder / INDEX).exists():
            paths = [
                folder / name for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
            ]
        else:
            others = (
                ", ".join(sorted(path.name for path in folder.glob("*.safetensors"))) or "no other .safetensors file"
            )
            raise FileNotFoundError(f"'{folder}' holds neither {SINGLE} nor {INDEX}; there is {others}")
    if missing := [f"'{path}'" for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"no such file: {', '.join(missing)}")
    return paths


def _check_once(files: Mapping[Path, Any]) -> None:
    places: dict[str, list[str]] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118
            places.setdefault(name, []).append(path.name)
    if twice := [f"{name} ({', '.join(paths)})" for name, paths in places.items() if len(paths) > 1]:
        raise ValueError(f"in more than one file: {'; '.join(twice)}")


def _check_kinds(contents: Contents, found: Mapping[str, Any]) -> None:
    wanted = {
        name: spec.dtype for s, tied in contents.units for ns, spec in zip(tied, s.flat.parameters) for name in ns
    }
    wanted |= {name: buffer.dtype for buffer, names in contents.buffers for name in names}
    wrong = []
    for name, dtype in wanted.items():
        if name in found:
            there = found[name].get_slice(name).get_dtype()
            if there != DTYPES.get(dtype) and not (dtype.is_floating_point and "F" in there):
                wrong.append(f"  {name} is {there} there and {dtype} here")
    if wrong:
        raise ValueError("only floating dtypes are cast to one another\n" + "\n".join(wrong))


def _check_tied(contents: Contents, found: Mapping[str, Any]) -> None:
    wrong = []
    for storage, tied in contents.units:
        for names, spec, piece in zip(tied, storage.flat.parameters, storage.pieces):
            there = [n for n in names if n in found]
            if len(there) > 1:
                first, *others = (_read(found[n], n, spec, piece).contiguous().view(torch.uint8) for n in there)
                if not all(torch.equal(first, other) for other in others):
                    wrong.append(f"  {', '.join(there)}")
    if wrong:
        raise ValueError("what is one parameter here has several values there\n" + "\n".join(wrong))


def _load(contents: Contents, found: Mapping[str, Any]) -> None:
    for storage, tied in contents.units:
        for index, (names, spec, piece) in enumerate(zip(tied, storage.flat.parameters, storage.pieces)):
            if (name := next((n for n in names if n in found), None)) is not None:
                storage.set_piece(index, _read(found[name], name, spec, piece).to(storage.shard.device))
    for buffer, names in contents.buffers:
        if (name := next((n for n in names if n in found), None)) is not None:
            buffer.copy_(found[name].get_tensor(name))


def _read(file: Any, name: str, spec: ParameterSpec, piece: Piece) -> Tensor:
    """A piece (length,) of a parameter in the order of its storage here: whole rows of that order are read, those it is in."""
    if not spec.shape or not piece.length:
        whole = file.get_tensor(name) if piece.length else torch.empty(0, dtype=spec.dtype)
        return whole.reshape(-1)
    order = storage_order(spec.shape, spec.stride)
    row = spec.numel // spec.shape[order[0]]
    begin, end = piece.start // row, -(-(piece.start + piece.length) // row)
    rows = file.get_slice(name)[(*[slice(None)] * order[0], slice(begin, end))]
    start = piece.start - begin * row
    return rows.permute(order).reshape(-1)[start : start + piece.length]


# -- writing


def save_safetensors(model: nn.Module, directory: str | os.PathLike[str], max_shard_bytes: int = 5 * 10**9) -> None:
    """Write what `save_pretrained` writes: `from_pretrained(directory)` of transformers reads it back, bit for bit.

    The weights go into model.safetensors, or into several files of at most `max_shard_bytes` (or of one larger tensor) and
    an index. Tied names come once, under the first. A model of transformers also gets its config.json (and its
    generation_config.json). Rank 0 writes, and holds one unit at a time; weights from before are replaced at the end, file by
    file: unlike `save` it is not atomic.
    A collective. Raises ValueError for dtypes and extra state that such files cannot hold; OSError on rank 0, which writes,
    and RuntimeError on the others.
    """
    contents = Contents.of(model, "save_safetensors")
    folder = Path(directory)
    files = _Files(folder, {}, 1)
    with together(contents.world, "save_safetensors"):
        tensors = _tensors(contents, max_shard_bytes)
        if contents.world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            files = _Files(folder, tensors, max_shard_bytes)
            files.begin()
    stream = streamed(contents)
    with together(contents.world, "save_safetensors"):
        try:
            for name, tensor in stream:
                files.write(name, tensor)
        finally:
            for _ in stream:
                pass  # where writing failed: the other ranks bring what is left of the units all the same
        if contents.world.is_first:
            files.finish()
            _save_config(model, folder)


def _tensors(contents: Contents, max_shard_bytes: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor by its first name, in the order of the state dict."""
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes!r}: a positive number of bytes was expected")
    dtypes = {names[0]: p.dtype for s, tied in contents.units for names, p in zip(tied, s.flat.parameters) if names}
    dtypes |= {names[0]: buffer.dtype for buffer, names in contents.buffers}
    wrong = [f"{name} is of {dtype}" for name, dtype in dtypes.items() if dtype not in DTYPES]
    wrong += [f"{name} is no tensor" for name in contents.others]
    if wrong:
        raise ValueError(f"safetensors files cannot hold this: {', '.join(wrong)}")
    return {names[0]: (dtypes[names[0]], shape) for names, shape in contents.shapes()}


class _Files:
    """The files of one model, on rank 0. They are written beside those that are there and take their names in the end."""

    def __init__(self, folder: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_shard_bytes: int):
        self.folder = folder
        self.sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (dtype, shape) in tensors.items()}
        groups = _grouped(self.sizes, max_shard_bytes)
        pattern = SINGLE if len(groups) == 1 else "model-{:05d}-of-{:05d}.safetensors"
        self.files = {pattern.format(i + 1, len(groups)): names for i, names in enumerate(groups)}
        self.headers: dict[str, bytes] = {}
        self.places: dict[str, tuple[str, int]] = {}
        for file, names in self.files.items():
            # The widest first: a reader takes views, which have to be aligned.
            ordered = sorted(names, key=lambda name: -tensors[name][0].itemsize)
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            offset = 0
            for name in ordered:
                dtype, shape = tensors[name]
                end = offset + self.sizes[name]
                header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
                self.places[name] = file, offset
                offset = end
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            self.headers[file] = len(text).to_bytes(8, "little") + text

    def _path(self, file: str) -> Path:
        return self.folder / f"{file}.incomplete"

    def begin(self) -> None:
        for file, header in self.headers.items():
            self._path(file).write_bytes(header)

    def write(self, name: str, tensor: Tensor) -> None:
        if name in self.places and tensor.numel():
            file, offset = self.places[name]
            flat = tensor.contiguous()
            with self._path(file).open("r+b") as stream:
                stream.seek(len(self.headers[file]) + offset)
                stream.write((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))

    def finish(self) -> None:
        for path in self.folder.iterdir():
            if _WRITTEN.fullmatch(path.name) and path.name.removesuffix(".incomplete") not in self.files:
                path.unlink()
        for file in self.files:
            self._path(file).replace(self.folder / file)
        if len(self.files) > 1:
            weight_map = {name: file for file, names in self.files.items() for name in names}
            index = {"metadata": {"total_size": sum(self.sizes.values())}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _grouped(sizes: Mapping[str, int], most: int) -> list[Sequence[str]]:
    """In order, as many as fit into a file; what fits into none has one of its own."""
    groups: list[list[str]] = [[]]
    alone: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        if size > most:
            alone.append([name])
        elif held + size > most:
            groups.append([name])
            held = size
        else:
            groups[-1].append(name)
            held += size
    return [*(g for g in groups if g), *alone] or [[]]


def _save_config(model: nn.Module, folder: Path) -> None:
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
