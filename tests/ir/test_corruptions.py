"""Sixteen kinds of corruption in the schedules of six models: each caught, by the right rule, naming the right node.

`test_verify.py` has mutants of one small model, at least two a rule; here the places are found in whatever schedule there is.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxshard
from examples import models
from fxshard.ir import Phase, Schedule, Slot
from fxshard.ir.aliasing import is_random, mutated_inputs
from fxshard.ir.nodes import describe, info
from fxshard.ir.verify import same_on_all_ranks, verify
from tests.capture.compare import WIDTH, Block, batches


class Stirred(nn.Module):
    """Dropout, BatchNorm, a tied and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.layers[3].linear.weight = self.layers[0].linear.weight
        self.layers[1].linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x))
        for layer in self.layers:
            x = self.dropout(self.norm(layer(x)))
        return x


def gpt() -> tuple[nn.Module, Any]:
    config = models.GPTConfig(layers=4, width=32, heads=2, vocabulary=64, length=8, dropout=0.1)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return models.GPT(config), {"tokens": tokens, "targets": tokens}


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], dict[str, Any]]] = {
    "gpt": (gpt, {"F": 4, "W": 8}),
    "encoder-decoder": (
        lambda: (models.encoder_decoder_small(), models.encoder_decoder_small_inputs()),
        {"F": 2, "W": 4},
    ),
    "resnet": (lambda: (models.resnet_small(), models.resnet_small_inputs()), {"F": 2, "W": 4}),
    "mlp": (lambda: (models.mlp_odd(), models.mlp_odd_inputs()), {"F": 3, "W": 6}),
    "llama": (llama, {"F": 2, "W": 4, "mixed_precision": fxshard.MixedPrecision(torch.bfloat16, torch.float32)}),
    "offloaded": (gpt, {"F": 2, "W": 4, "cpu_offload": True}),
    "stirred": (lambda: (Stirred(), (batches(1)[0],)), {"F": 2, "W": 4, "units": Block}),
}


@functools.cache
def traced(name: str) -> Schedule:
    make, options = MODELS[name]
    torch._dynamo.reset()
    return fxshard.trace(*make(), **options)


# -- where to break it: the middle one of what there is


def middle(phase: Phase, kind: str, where: Callable[[fx.Node], bool] = lambda n: True) -> fx.Node:
    found = [n for n in phase.nodes(kind) if where(n)]
    return found[len(found) // 2]


def gathered(s: Schedule) -> Callable[[fx.Node], bool]:
    """Whether a node is of a FlatParameter that is gathered and freed in forward and in backward, and has gradients."""
    assert s.backward is not None
    flats = {info(n).flat for n in s.forward.frees} & {info(n).flat for n in s.backward.all_gathers}
    flats &= {info(n).flat for n in s.backward.nodes("reduce_scatter")}
    return lambda n: info(n).flat in flats


# -- one corruption a function: breaks `s`, returns what the message has to name


def a_wait_dropped(s: Schedule) -> str:
    wait = middle(s.forward, "wait", gathered(s))
    wait.replace_all_uses_with(wait.args[0])
    s.forward.graph.erase_node(wait)
    return f"AG {info(wait).flat}"


def freed_early(s: Schedule) -> str:
    free = middle(s.backward, "free", gathered(s))
    s.backward.first_use(info(free).flat).prepend(free)
    return f"'{info(free).flat}' after its FREE"


def used_after_the_free_through_a_view(s: Schedule) -> str:
    free = middle(s.forward, "free", gathered(s))
    view = s.forward.views(info(free).flat)[0]
    with s.forward.graph.inserting_before(free):
        alias = s.forward.graph.call_function(torch.ops.aten.detach.default, (view,))
    with s.forward.graph.inserting_after(free):
        s.forward.graph.call_function(torch.ops.aten.sum.default, (alias,))
    return f"'{info(free).flat}' after its FREE"


def a_group_reordered_on_one_rank(s: Schedule) -> str:
    first, second = s.backward.nodes("reduce_scatter")[:2]
    s.agreed = tuple(s.skeleton())
    first.prepend(second)
    return describe(second)


def reduced_twice(s: Schedule) -> str:
    node = middle(s.backward, "reduce_scatter")
    with s.backward.graph.inserting_after(node):
        again = s.backward.graph.node_copy(node, lambda n: n)
    again.meta = {**node.meta, "fxshard": copy.copy(info(node))}
    return f"'{info(node).flat}' has 2 reduce_scatter"


def divided_twice(s: Schedule) -> str:
    node = middle(s.backward, "flatten_grads")
    node.update_arg(4, node.args[4] * s.num_batches)
    return describe(node)


def a_gathered_view_saved(s: Schedule) -> str:
    view = s.forward.views(info(middle(s.forward, "free", gathered(s))).flat)[0]
    s.forward.output.args = ((*s.forward.results, view),)
    return f"view of '{info(view).fqn}'"


def two_slots_overlapped(s: Schedule) -> str:
    nodes = [n for n in s.backward.graph.nodes if "slot" in n.meta and info(n).kind in ("flatten_grads", "all_gather")]
    for first, second in itertools.pairwise(nodes):
        if info(first).flat != info(second).flat and first.meta["slot"].offset != second.meta["slot"].offset:
            slot: Slot = first.meta["slot"]
            second.meta["slot"] = dataclasses.replace(second.meta["slot"], offset=slot.offset, after=())
            return f"over {describe(first)}"
    raise AssertionError("no two buffers alive together")


def the_limit_exceeded(s: Schedule) -> str:
    counted = [n for n in s.forward.all_gathers if s.counts(info(n).flat or "")]
    last = counted[-1]
    for member in [n for n in (last.prev, last) if info(n).kind in ("cast_shard", "load_shard", "all_gather")]:
        counted[0].append(member)
    return f"'{info(last).flat}'"


def a_buffer_mutation_lost(s: Schedule) -> str:
    node = next(n for n in s.forward.graph.nodes if mutated_inputs(n))
    s.forward.graph.erase_node(node)
    return node.name


def two_units_shards_swapped(s: Schedule) -> str:
    first, second = [n for n in s.forward.all_gathers if gathered(s)(n)][:2]
    first.args, second.args = (second.args[0], first.args[1]), (first.args[0], second.args[1])
    return describe(first)


def the_wrong_group(s: Schedule) -> str:
    node = middle(s.backward, "all_reduce")
    info(node).queue = "reduce"
    return describe(node)


def padding_in_the_gradient(s: Schedule) -> str:
    node = middle(s.backward, "flatten_grads")
    place, gradient = next((i, g) for i, g in enumerate(node.args[0]) if g is not None)
    with s.backward.graph.inserting_before(node):
        padded = s.backward.graph.call_function(torch.ops.aten.constant_pad_nd.default, (gradient, [0, 1]))
    value = gradient.meta["val"]
    padded.meta = {"val": torch.empty([*value.shape[:-1], value.shape[-1] + 1], device="meta")}
    node.update_arg(0, [padded if i == place else g for i, g in enumerate(node.args[0])])
    return f"'{s.flats[info(node).flat].fqns[place]}'"


def a_random_operator_recomputed(s: Schedule) -> str:
    node = next(n for n in s.forward.graph.nodes if is_random(n))
    reader = next(n for n in s.backward.graph.nodes if info(n).kind == "compute" and n.op == "call_function")
    with s.backward.graph.inserting_before(reader):
        again = s.backward.graph.create_node("call_function", node.target, (reader.all_input_nodes[0], *node.args[1:]))
    return describe(again)


def never_freed(s: Schedule) -> str:
    node = middle(s.backward, "free", gathered(s))
    for user in list(node.users):
        s.backward.graph.erase_node(user)
    s.backward.graph.erase_node(node)
    return f"'{info(node).flat}' is gathered and never freed"


def a_gradient_reduced_before_it_is_whole(s: Schedule) -> str:
    """FLAT before its last gradient, which for a parameter used twice is the sum."""
    node = middle(s.backward, "flatten_grads")
    max(g for g in node.args[0] if g is not None).prepend(node)
    return describe(node)


def a_load_left_out(s: Schedule) -> str:
    node = middle(s.forward, "load_shard")
    node.replace_all_uses_with(node.args[0])
    s.forward.graph.erase_node(node)
    return f"AG {info(node).flat} gathers '{info(node).flat}' without its LOAD"


def a_store_left_out(s: Schedule) -> str:
    node = middle(s.backward, "store_grad")
    node.replace_all_uses_with(node.args[0])
    s.backward.graph.erase_node(node)
    return f"'{info(node).flat}' is not brought to the host by one STORE"


def a_gradient_accumulated_on_the_device(s: Schedule) -> str:
    """The STORE is there, and ACC reads what was there before it."""
    node = middle(s.backward, "store_grad")
    wait = next(iter(node.users))
    wait.update_arg(0, node.args[0])
    return f"AR {info(node).flat} has 2 waits"


def a_store_on_the_wrong_queue(s: Schedule) -> str:
    node = middle(s.backward, "store_grad")
    info(node).queue = "compute"
    return describe(node)


def two_gradients_over_each_other_on_the_host(s: Schedule) -> str:
    first, second = s.backward.nodes("store_grad")[:2]
    slot: Slot = first.meta["slot"]
    second.meta["slot"] = dataclasses.replace(second.meta["slot"], offset=slot.offset, after=())
    return f"over {describe(first)}"


def a_slot_beyond_the_hosts_arena(s: Schedule) -> str:
    s.memory.host_bytes -= 16
    node = max(s.backward.nodes("store_grad"), key=lambda n: n.meta["slot"].offset + n.meta["slot"].num_bytes)
    return describe(node)


OFFLOADED = {
    "within_the_limit": the_limit_exceeded,
    "reads_its_own_flat_parameter": a_load_left_out,
    "reduced_exactly_once": a_store_left_out,
    "one_wait_for_each_issue": a_gradient_accumulated_on_the_device,
    "on_its_queue_and_group": a_store_on_the_wrong_queue,
    "slots_do_not_overlap": two_gradients_over_each_other_on_the_host,
    "every_buffer_has_a_slot": a_slot_beyond_the_hosts_arena,
}

EVERYWHERE = {
    "one_wait_for_each_issue": (a_wait_dropped,),
    "used_only_while_gathered": (freed_early, used_after_the_free_through_a_view),
    "order_is_agreed_on": (a_group_reordered_on_one_rank,),
    "reduced_exactly_once": (reduced_twice,),
    "divided_exactly_once": (divided_twice,),
    "nothing_leaves_gathered": (a_gathered_view_saved,),
    "slots_do_not_overlap": (two_slots_overlapped,),
    "within_the_limit": (the_limit_exceeded,),
    "reads_its_own_flat_parameter": (two_units_shards_swapped,),
    "on_its_queue_and_group": (the_wrong_group,),
    "padding_stays_outside": (padding_in_the_gradient,),
    "freed_or_resident": (never_freed,),
    "inputs_precede_uses": (a_gradient_reduced_before_it_is_whole,),
}
CASES = [
    (m, rule, c) for m in MODELS if m != "offloaded" for rule, corruptions in EVERYWHERE.items() for c in corruptions
]
CASES += [(m, "effects_as_captured", a_buffer_mutation_lost) for m in ("resnet", "stirred")]
CASES += [("offloaded", rule, corruption) for rule, corruption in OFFLOADED.items()]
CASES += [(m, "effects_as_captured", a_random_operator_recomputed) for m in ("gpt", "stirred")]


@pytest.mark.parametrize(("model", "rule", "corrupt"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_corruption_is_caught_by_its_rule_naming_the_node(model, rule, corrupt):
    s = traced(model).copy()
    verify(s)
    named = corrupt(s)
    with pytest.raises(fxshard.ScheduleError) as caught:
        verify(s)
    problems = [p for p in re.split(r"\n(?=\w+: )", str(caught.value)) if p.startswith(f"{rule}: ")]
    assert problems, f"caught, but not by {rule}:\n{caught.value}"
    assert any(named in p.split("\n  rule ")[0] for p in problems), f"{named!r} is not named by\n{problems[0]}"


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_that_differs_is_named_with_the_node(model):
    schedules = [traced(model).copy(reorder=True) for _ in range(3)]
    same_on_all_ranks(schedules)
    first, second = schedules[2].backward.nodes("reduce_scatter")[:2]
    first.prepend(second)
    with pytest.raises(fxshard.ScheduleError, match=f"rank 2: .*{re.escape(f'RS {info(second).flat}')}"):
        same_on_all_ranks(schedules)


def test_there_are_fifteen_kinds_and_five_models():
    assert len({corrupt for _, _, corrupt in CASES}) >= 15 and len({model for model, _, _ in CASES}) >= 5
