"""The rules of the verifier, by what they are about; `fxshard.ir.verify` lists and applies them."""

from __future__ import annotations

from torch import fx

Problem = tuple[fx.Node, str]
"""The node that breaks a rule, and how."""
