"""The lossless form of a schedule: JSON that reads back as the same schedule, to be verified, drawn, compared and edited
without the model. Constants of the model, `schedule.costs` and the seconds passes took are not in it. To read a schedule
imports the modules whose functions its operators are: read none that you would not run.

A size that was symbolic when captured is written with its expression and reads back as the size it had; written again it
has its expression again. An operator is named as torch names it, and has to be registered where the schedule is read.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxshard.ir import ops
from fxshard.ir.layout import FlatParameter, ParameterSpec
from fxshard.ir.nodes import INFO, NodeInfo, Slot, hint, user_line
from fxshard.ir.phase import Phase
from fxshard.ir.schedule import Accumulation, MemoryPlan, Origin, PassRecord, Remark, Schedule

FORMAT, VERSION = "fxshard schedule", 3

_WRITTEN = "fxshard_value"
"""Where a value keeps how it was written, device and expressions included: on the tensor, or in `node.meta`."""

_Overload = type(torch.ops.aten.mm.default)

_PLAIN = (
    "W", "F", "rate_limit", "rate_limit_bytes", "needs_presence", "direct_exchange", "held_shards", "num_batches",
    "gradient_divisor", "offloaded",
)  # fmt: skip


def schedule_to_json(schedule: Schedule, indent: int | None = None) -> str:
    """Raises ValueError for an argument of an operator that JSON cannot hold, naming the operator."""
    return json.dumps(schedule_to_document(schedule), indent=indent, ensure_ascii=False)


def schedule_to_document(schedule: Schedule) -> dict[str, Any]:
    """What `schedule_to_json` writes, for JSON that holds more than a schedule."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(schedule, name) for name in _PLAIN},
        "flats": [_flat_out(flat) for flat in schedule.flats.values()],
        "history": [_record_out(record) for record in schedule.history],
        "remarks": [dataclasses.asdict(remark) for remark in schedule.remarks],
        "memory": dataclasses.asdict(schedule.memory),
        "accumulation": {
            name: value if isinstance(value, str) else sorted(value)
            for name, value in dataclasses.asdict(schedule.accumulation).items()
        },
        "gradients": {fqn: node.name for fqn, node in schedule.gradients.items()},
        "parameter_outputs": sorted(schedule.parameter_outputs),
        "agreed": None if schedule.agreed is None else list(schedule.agreed),
        "resident": sorted(schedule.resident),
        "established": sorted(schedule.established),
        "origin": {name: dataclasses.asdict(origin) for name, origin in schedule.origin.items()},
        "phases": [
            {"name": phase.name, "nodes": [_node_out(node) for node in phase.graph.nodes]} for phase in schedule.phases
        ],
    }


def schedule_from_json(text: str) -> Schedule:
    """Raises ValueError for what is not a schedule, or names an operator that is not registered here."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a schedule: {error}") from None
    return schedule_from_document(document)


def schedule_from_document(document: Any) -> Schedule:
    """The schedule of `schedule_to_document`. Raises ValueError as `schedule_from_json` does."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a schedule: its format is not {FORMAT!r}")
    if document.get("version") != VERSION:
        raise ValueError(f"a schedule of version {document.get('version')}; this fxshard reads version {VERSION}")
    try:
        return _schedule_in(document)
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration, RuntimeError) as error:
        raise ValueError(f"not a whole schedule: {type(error).__name__}: {error}") from error


def _schedule_in(document: Mapping[str, Any]) -> Schedule:
    flats = {flat.name: flat for flat in map(_flat_in, document["flats"])}
    phases: list[Phase] = []
    nodes: dict[str, fx.Node] = {}
    for written in document["phases"]:
        phase, nodes = _phase_in(written, flats)
        phases.append(phase)
    return Schedule(
        flats,
        phases[0],
        phases[1] if len(phases) > 1 else None,
        **{name: document[name] for name in _PLAIN},
        history=[PassRecord(**{**r, "lines": tuple(r["lines"])}) for r in document["history"]],
        remarks=[Remark(**r) for r in document["remarks"]],
        memory=MemoryPlan(**document["memory"]),
        accumulation=Accumulation(
            document["accumulation"]["keep"],
            *(frozenset(document["accumulation"][name]) for name in ("kept", "kept_shards")),
        ),
        gradients={fqn: nodes[name] for fqn, name in document["gradients"].items()},
        parameter_outputs=frozenset(document["parameter_outputs"]),
        agreed=None if document["agreed"] is None else tuple(document["agreed"]),
        resident=set(document["resident"]),
        established=set(document["established"]),
        origin={
            name: Origin(tuple(o["effects"]), tuple(o["results"]), o["operators"])
            for name, o in document["origin"].items()
        },
    )


# -- units and history


def _flat_out(flat: FlatParameter) -> dict[str, Any]:
    return {f.name: _value_out(getattr(flat, f.name)) for f in dataclasses.fields(flat) if f.name != "parameters"} | {
        "parameters": [{f.name: _value_out(getattr(p, f.name)) for f in dataclasses.fields(p)} for p in flat.parameters]
    }


def _flat_in(written: Mapping[str, Any]) -> FlatParameter:
    parameters = tuple(
        ParameterSpec(**{name: _value_in(value, {}) for name, value in p.items()}) for p in written["parameters"]
    )
    rest = {name: _value_in(value, {}) for name, value in written.items() if name != "parameters"}
    return FlatParameter(**rest, parameters=parameters)


def _record_out(record: PassRecord) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "seconds": 0.0}


# -- nodes


def _node_out(node: fx.Node) -> dict[str, Any]:
    try:
        written: dict[str, Any] = {
            "name": node.name,
            "op": node.op,
            "target": _target_out(node.target) if node.op == "call_function" else str(node.target),
            "args": [_value_out(a) for a in node.args],
        }
        if node.kwargs:
            written["kwargs"] = {k: _value_out(v) for k, v in node.kwargs.items()}
    except ValueError as error:
        raise ValueError(f"operator '{node.name}' cannot be written: {error}") from None
    if (found := node.meta.get(INFO)) is not None:
        standard = NodeInfo(found.kind)
        changed = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
        written["info"] = {k: v for k, v in changed.items() if k == "kind" or v != getattr(standard, k)}
    if (value := node.meta.get(_WRITTEN, _tensor_out(node.meta.get("val")))) is not None:
        written["value"] = value
    if (slot := node.meta.get("slot")) is not None:
        written["slot"] = {"offset": slot.offset, "num_bytes": slot.num_bytes, "after": list(slot.after)}
    if line := user_line(node):
        written["line"] = line
    if "gradients" in node.meta:
        written["gradients"] = [g if g is None else g.name for g in node.meta["gradients"]]
    return written


def _phase_in(written: Mapping[str, Any], flats: Mapping[str, FlatParameter]) -> tuple[Phase, dict[str, fx.Node]]:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for entry in written["nodes"]:
        target = _target_in(entry["target"]) if entry["op"] == "call_function" else entry["target"]
        args = tuple(_value_in(a, nodes) for a in entry["args"])
        kwargs = {k: _value_in(v, nodes) for k, v in entry.get("kwargs", {}).items()}
        node = graph.create_node(entry["op"], target, args, kwargs, name=entry["name"])
        if node.name != entry["name"]:
            raise ValueError(f"not a schedule: two nodes are named {entry['name']!r}")
        nodes[node.name] = node
        if (found := entry.get("info")) is not None:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
            node.meta[INFO] = NodeInfo(**fields)
        if (value := entry.get("value")) is not None:
            node.meta["val"] = _tensor_in(value)
            if isinstance(value, dict) and "symbol" in value:
                node.meta[_WRITTEN] = value
        if (slot := entry.get("slot")) is not None:
            node.meta["slot"] = Slot(slot["offset"], slot["num_bytes"], tuple(slot["after"]))
        node.meta["line"] = entry.get("line", "")
    for entry in written["nodes"]:
        if "gradients" in entry:
            nodes[entry["name"]].meta["gradients"] = [g if g is None else nodes[g] for g in entry["gradients"]]
    return Phase(written["name"], graph, flats), nodes


def _target_out(target: Any) -> str:
    if target in ops.KINDS:
        return f"fxshard.{ops.KINDS[target]}"
    if isinstance(target, _Overload):
        return f"torch.ops.{target}"
    name = getattr(target, "__name__", "")
    if getattr(torch.ops.higher_order, name, None) is target:
        return f"torch.ops.higher_order.{name}"
    module, qualified = getattr(target, "__module__", None), getattr(target, "__qualname__", name)
    if module and qualified and _follow(importlib.import_module(module), qualified) is target:
        return f"{module}:{qualified}"
    raise ValueError(f"{target!r} is no function that can be found by name")


def _target_in(text: str) -> Callable[..., Any]:
    if text.startswith("fxshard."):
        return next(f for f, kind in ops.KINDS.items() if kind == text.removeprefix("fxshard."))
    module, _, qualified = text.partition(":")
    try:
        found = _follow(torch.ops, text.removeprefix("torch.ops.")) if not qualified else None
        found = found or _follow(importlib.import_module(module), qualified)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ValueError(f"operator {text} is not registered here: import what defines it before reading the schedule")
    return found


def _follow(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part, None)
        if owner is None:
            return None
    return owner


# -- values


def _value_out(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [_value_out(v) for v in value]}
    if isinstance(value, list):
        return [_value_out(v) for v in value]
    if isinstance(value, Mapping):
        return {"dict": [[_value_out(k), _value_out(v)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_value_out(v) for v in (value.start, value.stop, value.step)]}
    for kind in (torch.dtype, torch.layout, torch.memory_format, torch.device):
        if isinstance(value, kind):
            return {kind.__name__: str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if value is Ellipsis:
        return {"ellipsis": True}
    raise ValueError(f"an argument is {value!r}, of {type(value).__name__}")


def _value_in(written: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(written, list):
        return [_value_in(v, nodes) for v in written]
    if not isinstance(written, dict):
        return written
    ((kind, value),) = written.items()
    if kind == "node":
        return nodes[value]
    if kind == "tuple":
        return tuple(_value_in(v, nodes) for v in value)
    if kind == "dict":
        return {_value_in(k, nodes): _value_in(v, nodes) for k, v in value}
    if kind == "slice":
        return slice(*(_value_in(v, nodes) for v in value))
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(*value)
    if kind == "ellipsis":
        return ...
    if kind == "device":
        return torch.device(value)
    return getattr(torch, value)  # dtype, layout, memory format


def _tensor_out(value: Any) -> Any:
    """What is known of a node's value: a tensor's dtype, shape, stride and device, or a symbolic number."""
    if (written := getattr(value, _WRITTEN, None)) is not None:
        return written
    if isinstance(value, torch.Tensor):
        stride = [_size_out(s) for s in value.stride()] if value.layout == torch.strided else None
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [_size_out(s) for s in value.shape],
            "stride": stride,
            "device": str(value.device),
        }
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _size_out(value)
    if isinstance(value, (list, tuple)):
        return [_tensor_out(v) for v in value]
    return None


def _size_out(size: Any) -> Any:
    return size if isinstance(size, (int, float)) else {"symbol": str(size), "hint": size.node.hint}


def _tensor_in(written: Any) -> Any:
    if isinstance(written, list):
        return tuple(_tensor_in(v) for v in written)
    if not isinstance(written, dict) or "symbol" in written:
        return written["hint"] if isinstance(written, dict) else written
    shape, dtype = [_hint(s) for s in written["shape"]], getattr(torch, written["dtype"])
    strides = [_hint(s) for s in written["stride"]] if written["stride"] is not None else None
    if strides is None:
        tensor = torch.empty(shape, dtype=dtype, device="meta")
    else:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    setattr(tensor, _WRITTEN, written)
    return tensor


def _hint(size: Any) -> int:
    return size["hint"] if isinstance(size, dict) else hint(size)
