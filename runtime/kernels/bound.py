"""`flatten_cast_scale` of gradients that come in the same shapes at every step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fxshard.ir import FlatParameter

from . import flatten_cast_scale
from .plan import FlattenPlan


class BoundFlatten:
    """Gradients of all parameters of `flat` times `scale` -> a flat buffer (padded,), or added to one.

    On CPUs, from the third call in a row into a buffer on, a gradient that has its parameter's stride and the buffer's dtype
    is multiplied into its place, a view made once; for all others see `flatten_cast_scale`, which gives the same bits.
    """

    def __init__(self, flat: FlatParameter, scale: float, device: torch.device):
        self.flat, self.scale = flat, scale
        self.numels = [p.numel for p in flat.parameters]
        self.strides = [p.stride for p in flat.parameters]
        self.plan = FlattenPlan(flat.offsets, self.numels, flat.padded_numel, device)
        self._on_cpu = device.type == "cpu"
        self._last: weakref.ref[Tensor] | None = None
        self._out: Tensor | None = None
        self._places: list[Tensor] = []
        self._gaps: list[Tensor] = []

    def __call__(self, gradients: Sequence[Tensor | None], out: Tensor, accumulate: bool) -> None:
        if out is self._out and not accumulate and self._are_in_place(gradients):
            with torch.no_grad():
                for gap in self._gaps:
                    gap.zero_()
                for gradient, place in zip(gradients, self._places):
                    torch.mul(gradient, self.scale, out=place)  # type: ignore[arg-type]
            return
        flatten_cast_scale(
            gradients, self.flat.offsets, self.numels, out, self.scale,
            strides=self.strides, plan=self.plan, accumulate=accumulate,
        )  # fmt: skip
        if self._on_cpu and not accumulate and out is not self._out:
            # A buffer that is used once is not held.
            self._out, self._places, self._gaps = None, [], []
            if self._last is not None and self._last() is out:
                self._remember(out)
            self._last = weakref.ref(out)

    def _are_in_place(self, gradients: Sequence[Tensor | None]) -> bool:
        return all(
            g is not None and g.dtype is place.dtype and g.stride() == place.stride()
            for g, place in zip(gradients, self._places)
        )

    def _remember(self, out: Tensor) -> None:
        """The places of gradients in a buffer, and what lies between them."""
        self._out, start = out, out.storage_offset()
        with torch.inference_mode(False):
            self._places = [
                out.as_strided(p.shape, p.stride, start + offset)
                for p, offset in zip(self.flat.parameters, self.flat.offsets)
            ]
            covered = [(s.start + s.numel, s.start + s.span) for s in self.plan.segments]
            self._gaps = [out[begin:end] for begin, end in covered if begin < end]
