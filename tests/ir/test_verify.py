"""The verifier, by mutation: a right schedule broken in one place must be refused by the right rule, naming the unit."""

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import fxshard
from fxshard.ir import Schedule, ops, verify
from fxshard.ir.aliasing import is_random, mutated_inputs
from fxshard.ir.nodes import info
from tests.capture.compare import WIDTH, Framed, batches

Mutation = Callable[[Schedule], None]


class Random(Framed):
    """Dropout twice and BatchNorm before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(self.norm(self.dropout(x))))


def schedule(model: type[nn.Module] = Framed, **options) -> Schedule:
    return fxshard.trace(model(), (batches(1)[0],), **{"F": 2, **options})


def only(s: Schedule, phase: str, kind: str, flat: str) -> fx.Node:
    (node,) = getattr(s, phase).nodes(kind, flat)
    return node


def final_wait(s: Schedule, flat: str) -> fx.Node:
    return only(s, "backward", "accumulate_grad", flat).args[0]


def duplicate(node: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        copy = node.graph.node_copy(node, lambda n: n)
    copy.meta = dict(node.meta)
    return copy


def add_output(phase, node: fx.Node) -> None:
    phase.output.args = ((*phase.output.args[0], node),)


# -- one mutation a function; the name says what breaks


def wait_before_its_gather(s: Schedule) -> None:
    only(s, "forward", "all_gather", "layers.1").prepend(only(s, "forward", "wait", "layers.1"))


def flatten_before_its_gradients(s: Schedule) -> None:
    first = next(n for n in s.backward.graph.nodes if n.op == "call_function")
    first.prepend(only(s, "backward", "flatten_grads", "layers.1"))


def use_of_a_pending_gather(s: Schedule) -> None:
    view = s.forward.views("layers.1")[0]
    view.update_arg(0, only(s, "forward", "all_gather", "layers.1"))


def reduce_without_a_wait(s: Schedule) -> None:
    wait = final_wait(s, "layers.1")
    wait.replace_all_uses_with(wait.args[0])
    s.backward.graph.erase_node(wait)


def two_waits(s: Schedule) -> None:
    duplicate(only(s, "forward", "wait", "layers.1"))


def free_before_the_last_use(s: Schedule) -> None:
    s.forward.first_use("layers.1").prepend(only(s, "forward", "free", "layers.1"))


def a_view_read_after_the_free(s: Schedule) -> None:
    """The weight's transpose, an alias of an alias, is read one operator after the FREE."""
    free = only(s, "forward", "free", "layers.1")
    transposed = next(u for v in s.forward.views("layers.1") for u in v.users if u.target is torch.ops.aten.t.default)
    with s.forward.graph.inserting_after(free):
        s.forward.graph.call_function(torch.ops.aten.sum.default, (transposed,))


def two_frees(s: Schedule) -> None:
    duplicate(only(s, "backward", "free", "layers.1"))


def a_parameter_among_the_outputs(s: Schedule) -> None:
    add_output(s.forward, s.forward.views("layers.1")[0])


def an_alias_of_a_parameter_saved(s: Schedule) -> None:
    view = s.forward.views("layers.1")[0]
    with s.forward.graph.inserting_after(view):
        add_output(s.forward, s.forward.graph.call_function(torch.ops.aten.t.default, (view,)))


def the_gathered_buffer_itself_saved(s: Schedule) -> None:
    add_output(s.forward, only(s, "forward", "wait", "layers.1"))


def a_shard_among_the_outputs(s: Schedule) -> None:
    add_output(s.forward, only(s, "forward", "shard", "layers.1"))


def a_resident_among_the_outputs(s: Schedule) -> None:
    add_output(s.backward, s.backward.views("(root).1")[0])


def never_freed_in_backward(s: Schedule) -> None:
    s.backward.graph.erase_node(only(s, "backward", "free", "layers.1"))


def never_freed_in_forward(s: Schedule) -> None:
    free = only(s, "forward", "free", "layers.2")
    free.replace_all_uses_with(only(s, "forward", "free", "layers.1"))
    s.forward.graph.erase_node(free)


def a_resident_that_is_none(s: Schedule) -> None:
    s.resident.remove("(root).1")


def a_resident_never_freed(s: Schedule) -> None:
    s.backward.graph.erase_node(only(s, "backward", "free", "(root).1"))


def gradient_left_out(s: Schedule) -> None:
    flatten = only(s, "backward", "flatten_grads", "layers.1")
    flatten.update_arg(0, [None, flatten.args[0][1]])


def gradients_in_each_others_place(s: Schedule) -> None:
    flatten = only(s, "backward", "flatten_grads", "layers.1")
    flatten.update_arg(0, list(reversed(flatten.args[0])))


def gradient_counted_twice(s: Schedule) -> None:
    """Another unit's gradient goes where this unit's belongs: of equal shape, so nothing else would notice."""
    flatten, other = (only(s, "backward", "flatten_grads", f"layers.{i}") for i in (1, 2))
    flatten.update_arg(0, list(other.args[0]))


def whole_flatten_twice(s: Schedule) -> None:
    duplicate(only(s, "backward", "flatten_grads", "layers.1"))


def never_accumulated(s: Schedule) -> None:
    s.backward.graph.erase_node(only(s, "backward", "accumulate_grad", "layers.1"))


def accumulated_twice(s: Schedule) -> None:
    duplicate(only(s, "backward", "accumulate_grad", "layers.1"))


def reduced_twice(s: Schedule) -> None:
    scatter = duplicate(only(s, "backward", "reduce_scatter", "layers.1"))
    with s.backward.graph.inserting_after(scatter):
        wait = s.backward.graph.node_copy(final_wait(s, "layers.1"), lambda n: scatter)
    wait.meta = dict(final_wait(s, "layers.1").meta)


def reduce_of_another_units_buffer(s: Schedule) -> None:
    scatter = only(s, "backward", "reduce_scatter", "layers.1")
    scatter.update_arg(0, only(s, "backward", "flatten_grads", "layers.2"))


def gradient_leaves_as_an_output_too(s: Schedule) -> None:
    outputs = list(s.backward.output.args[0])
    outputs[min(s.parameter_outputs)] = s.gradients["layers.1.linear.weight"]
    s.backward.output.args = (tuple(outputs),)


def no_all_reduce(s: Schedule) -> None:
    reduce, wait = only(s, "backward", "all_reduce", "layers.1"), final_wait(s, "layers.1")
    accumulate = only(s, "backward", "accumulate_grad", "layers.1")
    accumulate.update_arg(0, reduce.args[0])
    for node in (wait, reduce):
        s.backward.graph.erase_node(node)


def all_reduce_before_the_scatter(s: Schedule) -> None:
    reduce = only(s, "backward", "all_reduce", "layers.1")
    reduce.update_arg(0, only(s, "backward", "flatten_grads", "layers.1"))


def all_gathers_at_the_top(s: Schedule) -> None:
    first = next(n for n in s.forward.graph.nodes if n.op == "call_function")
    throttle = only(s, "forward", "throttle", "layers.2")
    s.forward.graph.erase_node(throttle)
    first.prepend(only(s, "forward", "all_gather", "layers.2"))


def a_free_too_late(s: Schedule) -> None:
    gather = only(s, "forward", "all_gather", "layers.2")
    gather.append(only(s, "forward", "free", "layers.0"))
    s.forward.graph.erase_node(only(s, "forward", "throttle", "layers.2"))


def a_smaller_limit_than_planned_for(s: Schedule) -> None:
    s.rate_limit = 1


def fewer_bytes_than_planned_for(s: Schedule) -> None:
    s.rate_limit_bytes = 2 * s.flats["layers.1"].full_bytes - 1


def a_reduce_waited_for_at_the_end(s: Schedule) -> None:
    for node in (final_wait(s, "layers.2"), only(s, "backward", "accumulate_grad", "layers.2")):
        s.backward.output.prepend(node)


def fewer_gradient_buffers_than_planned_for(s: Schedule) -> None:
    s.rate_limit = 1


def a_slot_over_a_living_one(s: Schedule) -> None:
    first, second = only(s, "backward", "all_gather", "layers.2"), only(s, "backward", "all_gather", "layers.1")
    second.meta["slot"] = dataclasses.replace(second.meta["slot"], offset=first.meta["slot"].offset)


def a_slot_half_over_a_living_one(s: Schedule) -> None:
    first, second = only(s, "backward", "all_gather", "layers.2"), only(s, "backward", "all_gather", "layers.1")
    second.meta["slot"] = dataclasses.replace(second.meta["slot"], offset=first.meta["slot"].offset + 16)


def a_reused_slot_without_its_event(s: Schedule) -> None:
    for node in s.backward.graph.nodes:
        if "slot" in node.meta and node.meta["slot"].after:
            node.meta["slot"] = dataclasses.replace(node.meta["slot"], after=())


def a_reused_slot_behind_an_earlier_event(s: Schedule) -> None:
    first = next(n for n in s.backward.graph.nodes if n.op == "call_function")
    for node in s.backward.graph.nodes:
        if "slot" in node.meta and node.meta["slot"].after:
            node.meta["slot"] = dataclasses.replace(node.meta["slot"], after=(first.name,))


def a_slot_too_small(s: Schedule) -> None:
    node = only(s, "backward", "flatten_grads", "layers.1")
    node.meta["slot"] = dataclasses.replace(node.meta["slot"], num_bytes=16)


def replace_slot(node: fx.Node, **changes: int) -> None:
    node.meta["slot"] = dataclasses.replace(node.meta["slot"], **changes)


def a_slot_too_small_to_reduce_into(s: Schedule) -> None:
    replace_slot(only(s, "backward", "reduce_scatter", "layers.1"), num_bytes=16)


def no_slot(s: Schedule) -> None:
    del only(s, "forward", "all_gather", "layers.1").meta["slot"]


def a_slot_beyond_the_arena(s: Schedule) -> None:
    replace_slot(only(s, "forward", "all_gather", "layers.1"), offset=s.memory.arena_bytes)


def a_slot_that_is_not_aligned(s: Schedule) -> None:
    replace_slot(only(s, "forward", "all_gather", "layers.1"), offset=8)


def no_throttles(s: Schedule) -> None:
    for phase in s.phases:
        for node in phase.nodes("throttle"):
            phase.graph.erase_node(node)


def a_throttle_on_the_free_before(s: Schedule) -> None:
    """The one of two gathers ago: the stream may run one further than the limit."""
    only(s, "forward", "throttle", "layers.2").update_arg(0, only(s, "forward", "free", "layers.0"))


BF16 = fxshard.MixedPrecision(param=torch.bfloat16)
SUMS_IN_BF16 = fxshard.MixedPrecision(reduce=torch.bfloat16)


def a_view_one_further(s: Schedule) -> None:
    view = s.forward.views("layers.1")[0]
    view.update_arg(2, view.args[2] + 1)


def a_bias_at_the_place_of_its_weight(s: Schedule) -> None:
    weight, bias = s.forward.views("layers.1")
    bias.update_arg(2, weight.args[2])


def a_gather_of_another_shard(s: Schedule) -> None:
    gather, other = (only(s, "forward", "all_gather", flat) for flat in ("layers.1", "layers.0"))
    gather.update_arg(0, other.args[0])


def gradients_laid_down_in_another_order(s: Schedule) -> None:
    node = only(s, "backward", "flatten_grads", "layers.1")
    node.update_arg(2, tuple(reversed(node.args[2])))


def two_units_shards_swapped(s: Schedule) -> None:
    one, other = (only(s, "forward", "all_gather", flat) for flat in ("layers.1", "layers.2"))
    first, second = one.args[0], other.args[0]
    one.update_arg(0, second)
    other.update_arg(0, first)


def a_reduce_that_names_another_unit(s: Schedule) -> None:
    only(s, "backward", "reduce_scatter", "layers.1").update_arg(1, "layers.2")


def a_gather_on_the_replicate_queue(s: Schedule) -> None:
    only(s, "forward", "all_gather", "layers.1").meta["fxshard"].queue = "replicate"


def a_scatter_in_the_replicate_group(s: Schedule) -> None:
    only(s, "backward", "reduce_scatter", "layers.1").meta["fxshard"].queue = "replicate"


def an_all_reduce_among_no_replicas(s: Schedule) -> None:
    """A sum over the shard group where the ReduceScatter belongs."""
    node = only(s, "backward", "reduce_scatter", "layers.1")
    node.target, node.meta["fxshard"].kind = ops.all_reduce, "all_reduce"


def a_wait_on_the_reduce_queue(s: Schedule) -> None:
    only(s, "forward", "wait", "layers.1").meta["fxshard"].queue = "reduce"


def divided_twice(s: Schedule) -> None:
    node = only(s, "backward", "flatten_grads", "layers.1")
    node.update_arg(4, node.args[4] ** 2)


def never_divided(s: Schedule) -> None:
    only(s, "backward", "flatten_grads", "layers.1").update_arg(4, 1)


def divided_by_hand_too(s: Schedule) -> None:
    node = only(s, "backward", "flatten_grads", "layers.1")
    gradient = node.args[0][0]
    with s.backward.graph.inserting_before(node):
        half = s.backward.graph.call_function(torch.ops.aten.div.Tensor, (gradient, 2))
    node.update_arg(0, [half, *node.args[0][1:]])


def a_view_into_the_padding(s: Schedule) -> None:
    view = s.forward.views("layers.1")[1]
    view.update_arg(3, (view.args[3][0] + 1,))


def padding_in_the_gradient(s: Schedule) -> None:
    """The gradient as if the parameter were as long as its piece is with the padding."""
    gradient = s.gradients["layers.1.linear.bias"]
    gradient.meta["val"] = torch.empty(gradient.meta["val"].numel() + 1, device="meta")


def pieces_that_overlap(s: Schedule) -> None:
    flat = s.flats["layers.1"]
    s.flats["layers.1"] = dataclasses.replace(flat, offsets=(flat.offsets[0], flat.offsets[1] - 4))


def random_operator_run_again_in_backward(s: Schedule) -> None:
    node = next(n for n in s.forward.graph.nodes if is_random(n))
    reader = only(s, "backward", "flatten_grads", "layers.1")
    with s.backward.graph.inserting_before(reader):
        copy = s.backward.graph.call_function(node.target, (s.gradients["layers.1.linear.bias"], *node.args[1:]))
    copy.meta = {"val": node.meta["val"]}


def random_operators_swapped(s: Schedule) -> None:
    first, second = [n for n in s.forward.graph.nodes if is_random(n)][:2]
    second.append(first)


def random_operator_lost(s: Schedule) -> None:
    node = next(n for n in s.forward.graph.nodes if is_random(n))
    node.replace_all_uses_with(node.args[0])
    s.forward.graph.erase_node(node)


def a_buffers_new_value_lost(s: Schedule) -> None:
    s.forward.graph.erase_node(next(n for n in s.forward.graph.nodes if mutated_inputs(n)))


def buffers_written_in_another_order(s: Schedule) -> None:
    first, second = [n for n in s.forward.graph.nodes if mutated_inputs(n)][:2]
    second.append(first)


def a_result_too_few(s: Schedule) -> None:
    s.forward.output.args = (s.forward.results[:-1],)


def results_swapped(s: Schedule) -> None:
    first, second, *rest = s.forward.results
    s.forward.output.args = ((second, first, *rest),)


def reordered_after_ranks_agreed(s: Schedule) -> None:
    s.agreed = tuple(s.skeleton())
    first, second = s.forward.all_gathers[:2]
    for member in (second.prev, second) if ops.LABELS.get(second.prev.meta["fxshard"].kind) == "LIMIT" else (second,):
        first.prepend(member)


def a_collective_left_out_after_ranks_agreed(s: Schedule) -> None:
    s.agreed = (*s.skeleton(), "backward RS layers.9 64")


def an_operator_halved_by_hand(s: Schedule) -> None:
    """A division where no rule about gradients looks: above the gradient."""
    gradient = s.gradients["layers.1.linear.weight"]
    source = gradient.args[0]
    with s.backward.graph.inserting_before(gradient):
        half = s.backward.graph.call_function(torch.ops.aten.div.Tensor, (source, 2))
    gradient.replace_input_with(source, half)


def an_operator_replaced(s: Schedule) -> None:
    node = next(n for n in s.forward.graph.nodes if n.target is torch.ops.aten.addmm.default)
    node.target = torch.ops.aten.baddbmm.default


def a_gather_that_is_a_copy(s: Schedule) -> None:
    only(s, "forward", "all_gather", "layers.1").target = torch.ops.aten.clone.default


def a_wait_on_the_replicate_queue(s: Schedule) -> None:
    only(s, "forward", "wait", "layers.1").meta["fxshard"].queue = "replicate"


def a_free_on_the_unshard_queue(s: Schedule) -> None:
    only(s, "forward", "free", "layers.1").meta["fxshard"].queue = "unshard"


def a_view_of_the_shard(s: Schedule) -> None:
    view = s.forward.views("layers.1")[0]
    view.update_arg(0, only(s, "forward", "shard", "layers.1"))


def no_cast_before_the_gather(s: Schedule) -> None:
    gather = only(s, "forward", "all_gather", "layers.1")
    gather.update_arg(0, only(s, "forward", "shard", "layers.1"))


def a_slot_behind_an_event_of_another_queue(s: Schedule) -> None:
    node = next(n for n in reversed(s.backward.graph.nodes) if n.meta.get("slot") and n.meta["slot"].after)
    issued = [n for n in s.backward.graph.nodes if info(n).kind == "all_gather" and n < node]
    node.meta["slot"] = dataclasses.replace(node.meta["slot"], after=(issued[-1].name,))


def a_slot_before_the_arena(s: Schedule) -> None:
    replace_slot(only(s, "forward", "all_gather", "layers.1"), offset=-64)


MUTANTS: list[tuple[str, Mutation, str, dict]] = [
    ("inputs_precede_uses", wait_before_its_gather, "layers.1", {}),
    ("inputs_precede_uses", flatten_before_its_gradients, "layers.1", {}),
    ("one_wait_for_each_issue", use_of_a_pending_gather, "layers.1", {}),
    ("one_wait_for_each_issue", reduce_without_a_wait, "layers.1", {}),
    ("one_wait_for_each_issue", two_waits, "layers.1", {}),
    ("views_are_of_their_own_parameter", a_view_one_further, "layers.1", {}),
    ("views_are_of_their_own_parameter", a_bias_at_the_place_of_its_weight, "layers.1", {}),
    ("views_are_of_their_own_parameter", a_gather_of_another_shard, "layers.1", {}),
    ("views_are_of_their_own_parameter", gradients_laid_down_in_another_order, "layers.1", {}),
    ("used_only_while_gathered", free_before_the_last_use, "layers.1", {}),
    ("used_only_while_gathered", a_view_read_after_the_free, "layers.1", {}),
    ("used_only_while_gathered", two_frees, "layers.1", {}),
    ("nothing_leaves_gathered", a_parameter_among_the_outputs, "layers.1", {}),
    ("nothing_leaves_gathered", an_alias_of_a_parameter_saved, "layers.1", {}),
    ("nothing_leaves_gathered", the_gathered_buffer_itself_saved, "layers.1", {}),
    ("nothing_leaves_gathered", a_shard_among_the_outputs, "layers.1", {}),
    ("nothing_leaves_gathered", a_resident_among_the_outputs, "(root).1", {}),
    ("freed_or_resident", never_freed_in_backward, "layers.1", {}),
    ("freed_or_resident", never_freed_in_forward, "layers.2", {}),
    ("freed_or_resident", never_freed_in_forward, "layers.2", {"F": 1, "mixed_precision": BF16}),
    ("freed_or_resident", a_resident_that_is_none, "(root).1", {}),
    ("freed_or_resident", a_resident_never_freed, "(root).1", {}),
    ("reduced_exactly_once", gradient_left_out, "layers.1", {}),
    ("reduced_exactly_once", gradients_in_each_others_place, "layers.1", {}),
    ("reduced_exactly_once", gradient_counted_twice, "layers.1", {}),
    ("reduced_exactly_once", whole_flatten_twice, "layers.1", {}),
    ("reduced_exactly_once", never_accumulated, "layers.1", {}),
    ("reduced_exactly_once", accumulated_twice, "layers.1", {}),
    ("reduced_exactly_once", reduced_twice, "layers.1", {}),
    ("reduced_exactly_once", reduce_of_another_units_buffer, "layers.1", {}),
    ("reduced_exactly_once", gradient_leaves_as_an_output_too, "layers.1", {}),
    ("reduced_exactly_once", no_all_reduce, "layers.1", {"W": 4}),
    ("reduced_exactly_once", all_reduce_before_the_scatter, "layers.1", {"W": 4}),
    ("within_the_limit", all_gathers_at_the_top, "layers.2", {}),
    ("within_the_limit", a_free_too_late, "layers.2", {}),
    ("within_the_limit", a_smaller_limit_than_planned_for, "layers.1", {}),
    ("within_the_limit", fewer_bytes_than_planned_for, "layers.1", {}),
    ("gradients_within_the_limit", a_reduce_waited_for_at_the_end, "layers.2", {}),
    ("gradients_within_the_limit", fewer_gradient_buffers_than_planned_for, "layers.1", {}),
    ("streams_within_the_limit", no_throttles, "layers.2", {}),
    ("streams_within_the_limit", no_throttles, "layers.2", {"rate_limit": None, "rate_limit_bytes": 700}),
    ("streams_within_the_limit", a_throttle_on_the_free_before, "layers.2", {"rate_limit": 1}),
    ("every_buffer_has_a_slot", a_slot_too_small, "layers.1", {}),
    ("every_buffer_has_a_slot", a_slot_too_small_to_reduce_into, "layers.1", {"W": 4, "mixed_precision": SUMS_IN_BF16}),
    ("every_buffer_has_a_slot", no_slot, "layers.1", {}),
    ("every_buffer_has_a_slot", a_slot_beyond_the_arena, "layers.1", {}),
    ("every_buffer_has_a_slot", a_slot_that_is_not_aligned, "layers.1", {}),
    ("reads_its_own_flat_parameter", two_units_shards_swapped, "layers.1", {}),
    ("reads_its_own_flat_parameter", a_reduce_that_names_another_unit, "layers.1", {}),
    ("reads_its_own_flat_parameter", reduce_of_another_units_buffer, "layers.1", {}),
    ("on_its_queue_and_group", a_gather_on_the_replicate_queue, "layers.1", {"W": 4}),
    ("on_its_queue_and_group", a_scatter_in_the_replicate_group, "layers.1", {"W": 4}),
    ("on_its_queue_and_group", an_all_reduce_among_no_replicas, "layers.1", {}),
    ("on_its_queue_and_group", a_wait_on_the_reduce_queue, "layers.1", {}),
    ("divided_exactly_once", divided_twice, "layers.1", {}),
    ("divided_exactly_once", never_divided, "layers.1", {}),
    ("reduced_exactly_once", divided_by_hand_too, "layers.1", {}),
    ("padding_stays_outside", a_view_into_the_padding, "layers.1", {}),
    ("padding_stays_outside", padding_in_the_gradient, "layers.1", {}),
    ("padding_stays_outside", pieces_that_overlap, "layers.1", {}),
    ("operators_as_captured", an_operator_halved_by_hand, "div", {}),
    ("operators_as_captured", an_operator_replaced, "baddbmm", {}),
    ("reads_its_own_flat_parameter", a_gather_that_is_a_copy, "layers.1", {}),
    ("reads_its_own_flat_parameter", no_cast_before_the_gather, "layers.1", {"mixed_precision": BF16}),
    ("on_its_queue_and_group", a_wait_on_the_replicate_queue, "layers.1", {"W": 4}),
    ("on_its_queue_and_group", a_free_on_the_unshard_queue, "layers.1", {}),
    ("views_are_of_their_own_parameter", a_view_of_the_shard, "layers.1", {}),
    ("every_buffer_has_a_slot", a_slot_before_the_arena, "layers.1", {}),
    ("slots_do_not_overlap", a_slot_behind_an_event_of_another_queue, "", {}),
    ("effects_as_captured", random_operator_run_again_in_backward, "dropout", {"model": Random}),
    ("effects_as_captured", random_operators_swapped, "dropout", {"model": Random}),
    ("effects_as_captured", random_operator_lost, "dropout", {"model": Random}),
    ("effects_as_captured", a_buffers_new_value_lost, "copy_", {"model": Random}),
    ("effects_as_captured", buffers_written_in_another_order, "copy_", {"model": Random}),
    ("results_as_captured", a_result_too_few, "forward", {}),
    ("results_as_captured", results_swapped, "forward", {}),
    ("order_is_agreed_on", reordered_after_ranks_agreed, "layers.0", {"rate_limit": None}),
    ("order_is_agreed_on", a_collective_left_out_after_ranks_agreed, "backward", {}),
    ("slots_do_not_overlap", a_slot_over_a_living_one, "layers.1", {}),
    ("slots_do_not_overlap", a_slot_half_over_a_living_one, "layers.1", {}),
    ("slots_do_not_overlap", a_reused_slot_without_its_event, "layers.1", {}),
    ("slots_do_not_overlap", a_reused_slot_behind_an_earlier_event, "layers.1", {}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "mutate", "unit", "options"), MUTANTS, ids=[m[1].__name__ for m in MUTANTS])
def test_a_mutant_is_refused_by_the_right_rule_naming_the_unit(rule, mutate, unit, options):
    s = schedule(**options)
    verify.verify(s)
    mutate(s)
    with pytest.raises(fxshard.ScheduleError) as caught:
        verify.verify(s)
    problems = [p for p in re.split(r"\n(?=\w+: )", str(caught.value)) if p.startswith(f"{rule}: ")]
    assert problems, f"refused, but not by {rule}:\n{caught.value}"
    assert any(unit in p for p in problems), str(caught.value)
    assert all(re.search(r"\n  where   (forward|backward), op \d+ ", p) for p in problems)


class TwoHeads(Framed):
    """Outputs that reach different parameters, so that ranks ask one another which gradients exist."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[0](self.embed(x))
        return self.layers[1](x), self.head(x)


def no_question(s: Schedule) -> None:
    for node in s.backward.nodes("accumulate_grad"):
        node.args = node.args[:2]
    (ask,) = s.backward.nodes("presence")
    for node in (*ask.users, ask):
        s.backward.graph.erase_node(node)


def no_gradient_exists(s: Schedule) -> None:
    (ask,) = s.backward.nodes("presence")
    ask.update_arg(0, [False] * len(ask.args[0]))


def anothers_flags(s: Schedule) -> None:
    node = only(s, "backward", "accumulate_grad", "layers.1")
    node.update_arg(3, node.args[3] + 1)


@pytest.mark.parametrize("mutate", [no_question, no_gradient_exists, anothers_flags])
def test_what_ranks_ask_about_gradients_is_verified(mutate):
    s = schedule(TwoHeads)
    verify.verify(s)
    mutate(s)
    with pytest.raises(fxshard.ScheduleError, match="reduced_exactly_once"):
        verify.verify(s)


def test_every_rule_has_two_mutants():
    for rule in verify.RULES:
        assert sum(name == rule.__name__ for name, *_ in MUTANTS) >= 2


@pytest.mark.parametrize(
    "options",
    [{"F": 1}, {"F": 1, "W": 2}, {"F": 2}, {"F": 2, "W": 4}, {"F": 3, "rate_limit": None}, {"reshard_after_forward": False},
     {"mixed_precision": fxshard.MixedPrecision(param=torch.bfloat16)}],
    ids=str,
)  # fmt: skip
def test_right_schedules_pass(options):
    verify.verify(schedule(**options))


def test_all_that_is_broken_is_listed():
    s = schedule()
    never_accumulated(s)
    two_frees(s)
    with pytest.raises(fxshard.ScheduleError) as caught:
        verify.verify(s)
    assert "reduced_exactly_once" in str(caught.value) and "used_only_while_gathered" in str(caught.value)


def test_the_users_line_is_told():
    s = schedule()
    free_before_the_last_use(s)
    with pytest.raises(fxshard.ScheduleError, match=r"compare\.py:\d+"):
        verify.verify(s)


def test_the_pass_that_broke_it_is_told():
    class Hoist(fxshard.passes.Pass):
        name = "hoist"

        def apply(self, s, remarks):
            free_before_the_last_use(s)

    with pytest.raises(fxshard.ScheduleError) as caught:
        schedule(passes=[Hoist()])
    assert str(caught.value).endswith(
        "\n  after   hoist, pass 8 of 9; the schedule was valid before it"
        "\n  to do   fix hoist, or stop before it with stop_after='rate-limit'"
    )


def test_illegal_moves_name_what_pins_the_node():
    s = schedule()
    gather, wait = only(s, "forward", "all_gather", "layers.1"), only(s, "forward", "wait", "layers.1")
    with pytest.raises(fxshard.ScheduleError, match=r"WAIT layers\.1 may not move before AG layers\.1.*pins it"):
        s.forward.move_before(wait, gather)
    with pytest.raises(fxshard.ScheduleError, match=r"AG layers\.1 may not move before.*WAIT layers\.1 pins it"):
        s.forward.move_before(gather, wait.next)
    assert not s.forward.move_before(gather, gather.next)
    verify.verify(s)


def test_a_gather_moves_with_its_cast():
    s = schedule(mixed_precision=fxshard.MixedPrecision(param=torch.bfloat16), forward_prefetch=0, rate_limit=None)
    first = next(n for n in s.forward.graph.nodes if n.op == "call_function")
    gather, cast = (only(s, "forward", kind, "layers.1") for kind in ("all_gather", "cast_shard"))
    assert s.forward.move_before(gather, first)
    assert gather.prev is cast and gather.next is first
    assert not s.forward.move_before(gather, cast)  # it stands there already
    assert gather.prev is cast
    verify_order = list(s.forward.graph.nodes)
    assert verify_order.index(cast) < verify_order.index(gather)


def test_kinds_have_a_meaning_for_one_rank():
    """The reference bodies: F = 1, so a gather copies and reduces pass through."""
    value = torch.arange(6.0)
    assert torch.equal(ops.all_gather(value, "u"), value) and ops.all_gather(value, "u") is not value
    assert torch.equal(ops.param_view(value, "w", 2, (2, 2), (2, 1)), torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    flat = ops.flatten_grads([torch.ones(2), None, torch.ones(1)], "u", (0, 2, 4), 6, 2)
    assert flat.tolist() == [0.5, 0.5, 0, 0, 0.5, 0]
    assert ops.reduce_scatter(value, "u") is value and ops.all_reduce(value, "u") is value
    assert ops.wait(value, "u") is value and ops.cast_shard(value, "u", torch.bfloat16).dtype == torch.bfloat16
