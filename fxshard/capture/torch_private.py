"""Every private name of torch's modules that fxshard uses, in one place, tried on torch 2.11 and 2.13.

Not here: `_parameters` and `_buffers` of modules and `_schema` of operators, which much code outside torch reads.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import logging
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.source import CallMethodItemSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CAPTURE_FAILURES",
    "GENERATED",
    "NEEDS_VALUES",
    "BatchNorm",
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "aot",
    "argument_index",
    "backward_node",
    "budget_partition",
    "default_generator",
    "default_partition",
    "default_store",
    "default_timeout",
    "detect_fake_mode",
    "forget_fakes",
    "gradient_hooks",
    "is_tangent",
    "keep_saved_tensors",
    "leaf_name",
    "may_get_gradient",
    "negative_view",
    "own_code",
    "plain_fake",
    "pytree",
    "recompile_limit",
    "same_memory",
    "storage_uses",
    "surviving_outputs",
    "tensor_uses",
    "what_dispatches",
    "while_capturing",
    "will_run",
    "without_default_device",
    "wrapper_subclass",
    "written_arguments",
]


CAPTURE_FAILURES = (TorchDynamoException, BackendCompilerFailed, FailOnRecompileLimitHit)
"""What a call of a torch.compiled function raises when it could not be captured."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""A fake tensor was asked for what only values can tell."""

_NUMBERS = itertools.count()


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, TypeError) and "'function' and 'function'" in str(error))


# torch 2.11 sorts each setting that is a set when it writes its statistics of a capture. It fails at the functions that
# `while_capturing` puts there, and logs that as an error, with a traceback, once a capture. 2.13 leaves the setting out.
logging.getLogger("torch._dynamo.metrics_context").addFilter(_is_news)


def aot(
    graph_module: fx.GraphModule,
    examples: Sequence[Any],
    forward_compiler: Callable[..., Any],
    backward_compiler: Callable[..., Any],
    inference_compiler: Callable[..., Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """AOTAutograd without decompositions; input mutations stay in the forward graph.

    Backward is traced without autocast, as eager runs it: torch's default, that of the call, casts fp32 gradients too.
    """
    with functorch_config.patch(backward_pass_autocast="off"), _writes_to_numbers_kept(examples):
        return aot_module_simplified(
            graph_module,
            examples,
            fw_compiler=forward_compiler,
            bw_compiler=backward_compiler,
            inference_compiler=inference_compiler,
            partition_fn=partition,
            decompositions={},
            keep_inference_input_mutations=True,
        )


@contextlib.contextmanager
def _writes_to_numbers_kept(examples: Sequence[Any]) -> Iterator[None]:
    """torch sees a number in each 0-d float64 tensor on the CPU. Where it is not used as one AOTAutograd asks Dynamo to
    capture again, as if it were a constant, and Dynamo then drops what is written to it in place. There is nothing to
    capture again where the number's source is a tensor: said here, before AOTAutograd asks."""
    mode = detect_fake_mode(examples)
    sources = {} if mode is None or mode.shape_env is None else mode.shape_env.var_to_sources
    names = {str(s) for s, found in sources.items() if any(isinstance(f, CallMethodItemSource) for f in found)}
    added = names - TensorifyState.force_specializations
    TensorifyState.force_specializations |= added
    try:
        yield
    finally:
        TensorifyState.force_specializations -= added


def budget_partition(
    joint: fx.GraphModule, inputs: Any, budget: float, drawn: Sequence[fx.Node], *, num_fwd_outputs: int, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph; at most about this fraction is kept for backward of the bytes between the
    inputs (0) and what torch's cut for speed keeps (1), the rest computed again. `drawn` are the random operators, which are
    never run again.

    At 0 torch keeps the inputs and nothing else, also not what is marked: a fraction just above it is asked for. Where nothing
    but random operators is left to be kept, it keeps the tuple that dropout returns; then a budget of 1 asks for no more.
    """
    for node in drawn:
        for part in (node, *(user for user in node.users if user.target is operator.getitem)):
            part.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for asked in (max(budget, 1e-6), 1.0):
        with functorch_config.patch(activation_memory_budget=asked):
            parts = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        kept = next(iter(reversed(parts[0].graph.nodes))).args[0][num_fwd_outputs:]
        if not any(isinstance(node.meta.get("val"), tuple) for node in kept):
            break
    return parts


def plain_fake(fake_mode: FakeTensorMode, example: torch.Tensor) -> torch.Tensor:
    """A plain fake tensor of the example's logical shape; nothing is allocated."""
    with fake_mode:
        value = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
    return value.requires_grad_(example.requires_grad)


def argument_index(placeholder: fx.Node) -> int | None:
    """Which argument of the captured function an AOT forward placeholder is, or None (random state, tokens)."""
    descriptor = placeholder.meta.get("desc")
    return getattr(descriptor, "idx", None)


def may_get_gradient(placeholder: fx.Node) -> bool:
    """Whether backward has a result for an AOT forward placeholder: for arguments, and for the common base that stands for
    several that share memory and are written to; not for random states and tokens."""
    descriptor = placeholder.meta.get("desc")
    return argument_index(placeholder) is not None or hasattr(descriptor, "base_of")


def is_tangent(placeholder: fx.Node) -> bool:
    """Whether an AOT backward placeholder is the gradient of an output."""
    return placeholder.name.startswith("tangents")


def module_ids(node: fx.Node) -> list[int]:
    """The `id` of each module the operator (or the one it differentiates) was traced in, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    keys = [str(key).partition("@")[0] for key in stack]  # a module that is called again is `id@1`
    return [int(key) for key in keys if key.isdigit()]


def sequence_number(node: fx.Node) -> int | None:
    """A number that a forward operator and its backward operators share."""
    return node.meta.get("seq_nr")


VIEWS = 64
"""Of how many views one of another an output may be."""


def backward_node(outputs: Sequence[Any]) -> Any:
    """The AOT autograd node behind a call's outputs, or None.

    Outputs that alias an intermediate hang off it by their views, whose chain is followed. What aliases an input may have
    any history: of that no more than `VIEWS` edges are walked.
    """
    level = {t.grad_fn: None for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None}
    seen: set[Any] = set()
    for _ in range(VIEWS):
        for node in level:
            function = getattr(type(node), "_forward_cls", None)
            if function is not None and hasattr(function, "_aot_id"):
                return node
        seen.update(level)
        level = {p: None for node in level for p, _ in node.next_functions if p is not None and p not in seen}
    return None


def keep_saved_tensors(node: Any) -> None:
    """Say that backward overwrites none of its saved tensors, so that a graph may be retained (donated buffers)."""
    type(node)._forward_cls.metadata.bw_donated_idxs = []


def leaf_name(node: Any) -> str | None:
    """The `fqn` of the parameter an AccumulateGrad node belongs to; None for other nodes."""
    return getattr(getattr(node, "variable", None), "fqn", None)


def will_run(node: Any) -> bool:
    """During a backward: whether the engine is going to run this node (not with `inputs=` or autograd.grad of others)."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        raise RuntimeError(
            "torch.autograd.grad cannot ask for parameters of a sharded model: their reduced gradients go to .grad, by "
            "loss.backward()"
        ) from error


def surviving_outputs(node: Any) -> list[int]:
    """For an AOT autograd node: which of its outputs' gradients become tangents of the backward graph, in order."""
    metadata = type(node)._forward_cls.metadata
    mutated = metadata.mutated_inp_runtime_indices
    result = []
    for i, index in enumerate(mutated):
        entry = metadata.input_info[index]
        if entry.mutates_data and entry.requires_grad:
            result.append(i)
    for i, entry in enumerate(metadata.output_info):
        kind = entry.output_type.name
        needs = getattr(entry, "requires_grad_for_backward", entry.requires_grad)
        own = kind in ("non_alias", "unsafe_view_alias", "custom_function_view")
        if own and issubclass(entry.raw_type, torch.Tensor) and needs:
            result.append(len(mutated) + i)
    start = len(mutated) + metadata.num_outputs
    return result + list(range(start, start + metadata.num_intermediate_bases))


@contextlib.contextmanager
def without_default_device() -> Iterator[None]:
    """A `with torch.device(...)` around a trace, under which the model was made, is not to reach what is traced."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch.overrides._pop_mode())
    try:
        for mode in reversed(modes):
            if not isinstance(mode, DeviceContext):
                torch.overrides._push_mode(mode)
        yield
    finally:
        while torch._C._len_torch_function_stack():
            torch.overrides._pop_mode()
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)


def while_capturing() -> AbstractContextManager[Any]:
    """Dynamo's settings for our captures: calls of loggers in forward are dropped instead of breaking the graph."""
    ignored = torch._dynamo.config.ignore_logging_functions | _logger_methods()
    return torch._dynamo.config.patch(ignore_logging_functions=ignored)


def recompile_limit() -> int:
    """How many captures of one model Dynamo keeps."""
    return torch._dynamo.config.recompile_limit


@functools.cache
def _logger_methods() -> frozenset[Callable[..., Any]]:
    levels = ("debug", "info", "warning", "error", "exception", "critical", "log")
    names = (*levels, "info_once", "warning_once", "warning_advice")  # the last three are Hugging Face's
    return frozenset(getattr(logging.Logger, n) for n in names if hasattr(logging.Logger, n))


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with a code object of its own: Dynamo's cache and its limit are then per model.

    What Dynamo learns about changing shapes it keeps by file and line, so those are the copy's own too.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_filename=f"<fxshard call {next(_NUMBERS)}>")
    # Globals of its own as well: Dynamo puts what it compiled there, and the module's would keep it alive.
    names = dict(function.__globals__)
    copy = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def wrapper_subclass(
    kind: type,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Any:
    """A tensor of class `kind` that has a shape and no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(
        kind, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )


def dispatch_modes() -> list[str]:
    """The names of the TorchDispatchModes that are active and stop Dynamo; `any_dispatch_mode()` asks faster."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return [type(m).__name__ for m in modes if not m.is_infra_mode() and not m.ignore_compile_internals()]


any_dispatch_mode = torch.utils._python_dispatch.any_torch_dispatch_mode_on_stack


def default_store() -> dist.Store:
    """The store of the default process group: the control plane of ranks that may not all be in a collective."""
    return dist.distributed_c10d._get_default_store()


def coalesced(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """Inside, AllGathers of `group` are kept back; they are issued at the end, as one launch."""
    return dist.distributed_c10d._coalescing_manager(group)


def default_timeout(device: torch.device) -> datetime.timedelta:
    """The timeout the default process group was made with, for this device; a new group has torch's own else."""
    return dist.distributed_c10d._get_default_group()._get_backend(device).options._timeout


def storage_uses(tensor: torch.Tensor) -> int:
    """How many hold the storage of `tensor`: itself, its views, and the storage object made to ask."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor (numel,) on the memory of a contiguous one that neither keeps it alive nor counts among its uses."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (tensor.numel(),))  # type: ignore[call-overload]


def tensor_uses(tensor: torch.Tensor) -> int:
    """How many hold the tensor from C++; 1 while only Python does, however often."""
    return tensor._use_count()  # type: ignore[attr-defined]


def gradient_hooks(parameter: torch.Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """The parameter's tensor hooks and its post-accumulate-grad hooks, by handle id."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


def norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each tensor, 0-d, in one call."""
    return list(torch._foreach_norm(list(tensors), order))


def unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """gradients *= inverse, in place; found_inf becomes 1 where an element is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, inverse)


def default_generator(device: torch.device) -> torch.Generator:
    """What random operators on a device draw from unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def forget_fakes(mode: FakeTensorMode) -> None:
    """Drop the weak references to the fake tensors it made: a tensor that has one cannot be swapped."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, lists taken apart."""
    written: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, (list, tuple)) else (value,)
    return written


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, negated when it is read."""
    return torch._neg_view(tensor)


GENERATED = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
"""Where torch keeps what it generates from operators: functions, those of torch.nn.functional, methods of tensors."""


class _Dispatched(TorchDispatchMode):
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def what_dispatches(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Any] | None:
    """The operators, with their arguments, that a call with tensors on the meta device dispatches below autograd; None where
    it cannot be called so."""
    with torch._C._AutoDispatchBelowAutograd(), _Dispatched() as mode:
        try:
            function(*args, **kwargs)
        except (TypeError, RuntimeError):
            return None
    return mode.calls
