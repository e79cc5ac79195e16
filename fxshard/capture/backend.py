"""The torch.compile backend: a Dynamo graph in, phases to the schedule maker, a runnable step out.

[Note: one call]
Dynamo calls what `CaptureBackend` returns with the module's parameters, buffers and inputs. AOTAutograd's own wrappers
look after mutation, aliased outputs and tangent strides and call our forward inside an autograd node. A pre-hook on
that node sees which outputs got a gradient before zeros are made for the others, and keeps the call's state alive
exactly as long as its backward may come: a dropped loss drops the node, the hook and the state.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from fxshard.capture import torch_private
from fxshard.capture.build import Captured, build_phases
from fxshard.errors import CaptureError
from fxshard.ir.aliasing import is_random
from fxshard.ir.layout import FlatParameter
from fxshard.ir.nodes import info
from fxshard.ir.schedule import Schedule
from fxshard.parameter import ShardedParameter


class Program(Protocol):
    """A lowered schedule. Both take a list of arguments and empty it."""

    def forward(self, arguments: list[Any]) -> Sequence[Any]: ...

    def backward(self, arguments: list[Any], given: tuple[bool, ...]) -> Sequence[Any]: ...

    def begin_call(self) -> Any: ...

    def begin_backward(self, call: Any, skipped: frozenset[str]) -> None: ...


class Host(Protocol):
    """What a compiled model gives the backend."""

    flats: dict[str, FlatParameter]
    activation_memory_budget: float | None

    def foreign(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter of the model, None for any other tensor."""

    def module_names(self) -> dict[int, str]:
        """The name of each module of the model, by its `id`."""

    def schedule(self, captured: Captured) -> Schedule: ...

    def program(self, schedule: Schedule, root: torch.nn.Module) -> Program: ...


class CaptureBackend:
    """Called by Dynamo once per captured signature. Dynamo keeps its backends for good, so this one holds nothing."""

    def __init__(self, host: Host):
        self.host = weakref.ref(host)

    def __call__(self, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        values = [n.meta.get("example_value") for n in placeholders]
        fake_mode = torch_private.detect_fake_mode(values)
        assert fake_mode is not None, "Dynamo always traces with fake tensors"
        host = self.host()
        assert host is not None, "the model is gone"
        names: dict[int, str] = {}
        plain: list[Any] = []
        for i, (value, example) in enumerate(zip(values, examples)):
            if isinstance(example, ShardedParameter):
                names[i] = example.fqn
                whole = torch_private.plain_fake(fake_mode, value if isinstance(value, torch.Tensor) else example)
                plain.append(whole.requires_grad_(example.requires_grad))
            elif isinstance(example, torch.nn.Parameter) and (name := host.foreign(example)) is not None:
                raise CaptureError(
                    f"parameter '{name}' is not sharded: it was put into the model after fxshard.compile (a new module, or "
                    "load_state_dict(assign=True)), and its gradient would stay this rank's own. Change the model before "
                    "fxshard.compile, and load with assign=False"
                )
            else:
                plain.append(example)
        call = _Compiled(host, names)
        function = torch_private.aot(
            graph_module, plain, call.forward_compiler, call.backward_compiler, call.inference_compiler, call.partition
        )
        return call.wrap(function)


class _Compiled:
    """One captured signature: its schedule, its program, and the state of the call under way.

    Dynamo's cache holds this object where the garbage collector does not see it, and model and programs lead to that
    cache: references to both are weak. A program is held by the model's executor, and by each backward that may come.
    """

    def __init__(self, host: Host, names: Mapping[int, str]):
        self._host, self.names = weakref.ref(host), names
        self._program: weakref.ref[Program] | None = None
        self.given: tuple[bool, ...] = ()
        self.leaves: list[tuple[int, str]] | None = None
        """Where among its autograd node's inputs the parameters are."""

    @property
    def host(self) -> Host:
        host = self._host()
        assert host is not None, "the model is gone"
        return host

    @property
    def program(self) -> Program:
        program = None if self._program is None else self._program()
        assert program is not None, "the model is gone, or was not lowered"
        return program

    # -- compile time

    def partition(self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        budget = self.host.activation_memory_budget
        if budget is None:
            forward, backward = torch_private.default_partition(
                joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
            )
        else:
            drawn = [node for node in joint.graph.nodes if is_random(node)]  # again it would be something else
            forward, backward = torch_private.budget_partition(
                joint, inputs, budget, drawn, num_fwd_outputs=num_fwd_outputs, **options
            )
        self.root = forward
        captured = build_phases(
            forward.graph, backward.graph, self.names, _indices(forward.graph), num_fwd_outputs, self.host.flats,
            self.host.module_names(),
        )  # fmt: skip
        self._adopt(backward)
        self._make(_copied(captured))
        forward.recompile()
        return forward, _skeleton(backward)

    def _adopt(self, backward: fx.GraphModule) -> None:
        """Constants backward reads but forward does not."""
        for node in backward.graph.find_nodes(op="get_attr"):
            if not hasattr(self.root, node.target):
                setattr(self.root, node.target, getattr(backward, node.target))

    def _make(self, captured: Captured) -> None:
        self._program = weakref.ref(self.host.program(self.host.schedule(captured), self.root))

    def forward_compiler(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> Sequence[Any]:
            return self.program.forward(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def inference_compiler(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        output = next(iter(reversed(module.graph.nodes)))
        self.root = module
        indices = _indices(module.graph)
        host = self.host
        number = len(output.args[0])
        self._make(build_phases(module.graph, None, self.names, indices, number, host.flats, host.module_names()))
        return self.forward_compiler(module, inputs)

    def backward_compiler(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> Sequence[Any]:
            return self.program.backward(arguments, self.given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    # -- run time

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            program = self.program
            state = program.begin_call()
            outputs = function(*arguments)
            autograd_node = torch_private.backward_node(outputs)
            if autograd_node is not None:
                surviving = torch_private.surviving_outputs(autograd_node)
                torch_private.keep_saved_tensors(autograd_node)

                node = weakref.ref(autograd_node)  # a hook that held its node would never be freed

                def before_backward(gradients: tuple[Any, ...]) -> None:
                    self.given = tuple(gradients[i] is not None for i in surviving)
                    program.begin_backward(state, self._skipped(node()))

                autograd_node.register_prehook(before_backward)
            return outputs

        return call

    def _skipped(self, node: Any) -> frozenset[str]:
        """Parameters that torch.autograd.grad or backward(inputs=...) did not ask for: they are left alone."""
        inputs = node.next_functions
        if self.leaves is None:
            named = ((i, torch_private.leaf_name(leaf)) for i, (leaf, _) in enumerate(inputs))
            self.leaves = [(i, fqn) for i, fqn in named if fqn is not None]
        return frozenset(fqn for i, fqn in self.leaves if not torch_private.will_run(inputs[i][0]))


def _indices(graph: fx.Graph) -> dict[fx.Node, int | None]:
    return {n: torch_private.argument_index(n) for n in graph.find_nodes(op="placeholder")}


def _copied(captured: Captured) -> Captured:
    """Phases of their own: passes edit them while AOTAutograd keeps the graphs it partitioned."""
    forward, _ = captured.forward.copy()
    assert captured.backward is not None
    backward, mapping = captured.backward.copy()
    gradients = {fqn: mapping[node] for fqn, node in captured.gradients.items()}
    return dataclasses.replace(captured, forward=forward, backward=backward, gradients=gradients)


def _skeleton(module: fx.GraphModule) -> fx.GraphModule:
    """Placeholders and outputs of backward alone: what AOTAutograd reads of it. It copies and keeps what it is
    given."""
    graph = fx.Graph()
    first = None
    for node in module.graph.find_nodes(op="placeholder"):
        if info(node).kind != "parameter":
            copy = graph.placeholder(node.name)
            copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta", "desc")}
            first = first or copy
    output = next(iter(reversed(module.graph.nodes)))
    graph.output(tuple(None if value is None else first for value in output.args[0])).meta = dict(output.meta)
    return fx.GraphModule(torch.nn.Module(), graph)
