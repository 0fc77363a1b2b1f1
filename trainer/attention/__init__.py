"""Causal attention: local functions, the TPU kernel, and how a sequence is divided over devices."""

from trainer.attention.attend import attend
from trainer.attention.masks import AttentionSpec, Places, documents
from trainer.attention.order import balanced_order, to_balanced

__all__ = ["AttentionSpec", "Places", "attend", "balanced_order", "documents", "to_balanced"]
