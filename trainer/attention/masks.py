"""What a query may look at: positions, documents, a window. The same rule for every implementation.

Legend: b batch, t query position, s key position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Which attention, and computed how."""

    implementation: Literal["xla", "xla_chunked", "splash"] = "xla"
    chunk: int = 512
    """Queries of one chunk (xla_chunked); largest block of the kernel (splash)."""
    window: int | None = None
    """Positions that a query looks back, its own included."""
    soft_cap: float | None = None
    exchange: Literal["all_gather", "ring"] = "all_gather"
    interpret: bool = True
    """The kernel is interpreted, because there is no TPU."""


class Places(NamedTuple):
    """Where each token of a sequence stands."""

    positions_t: jax.Array
    """int32: position in its sequence; not ascending when a context axis is balanced."""
    segments_bt: jax.Array | None
    """int32: document of the token; None when sequences are single documents."""


def may_attend(queries: Places, keys: Places, window: int | None) -> jax.Array:
    """Boolean (b or 1, t, s): causal, within the window, within the document."""
    distance_ts = queries.positions_t[:, None] - keys.positions_t[None, :]
    allowed_ts = distance_ts >= 0
    if window is not None:
        allowed_ts &= distance_ts < window
    if queries.segments_bt is None or keys.segments_bt is None:
        return allowed_ts[None]
    return allowed_ts[None] & (queries.segments_bt[:, :, None] == keys.segments_bt[:, None, :])


def documents(tokens_bt: jax.Array, separator: int) -> jax.Array:
    """int32 (b, t): number of the document that each token belongs to; a separator ends its own."""
    ends_bt = (tokens_bt == separator).astype(jnp.int32)
    return jnp.cumsum(ends_bt, axis=1) - ends_bt
