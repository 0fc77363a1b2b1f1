"""Fingerprints of arrays, and the manifest that goes into every checkpoint with them.

Storage may hand back altered weights without an error (a flipped bit in array data is not noticed
by the checkpoint library), so each leaf carries an integer fingerprint computed from the very arrays
that are saved and checked on the arrays that were restored. It does not depend on the sharding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recipes.errors import UserError

FORMAT = 1
"""Version of the manifest and of the fingerprint; another one is refused, not guessed at."""


class Damaged(Exception):
    """A checkpoint is not what was saved."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, for example ``params/decoder/embedding``, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Plain nested dicts by path: what is saved does not depend on the classes of the state."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        folder = root
        for key in folders:
            folder = folder.setdefault(key, {})
        folder[name] = leaf
    return root


@jax.jit
def _fingerprint(array: jax.Array) -> jax.Array:
    """One uint32 for an array, computed where the array is.

    Sum over all elements of (mixed word) x (odd number from the global index), modulo 2^32. Addition
    modulo 2^32 has no order, so every sharding gives the same value; mixing is a bijection and an odd
    factor has an inverse, so any change confined to one word changes the sum.
    """
    words = _words(array)
    # The high half also enters the low half: float32 values that came from bfloat16 have an empty one,
    # and differences with many trailing zeros would let swapped blocks cancel.
    words = words ^ (words >> 16)
    index = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        stride = math.prod(words.shape[dim + 1 :]) % 2**32
        if size > 1:
            index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride)
    factor = index * jnp.uint32(0x9E3779B1)
    factor = (factor ^ (factor >> 15)) * jnp.uint32(0x85EBCA77)
    return jnp.sum(words * ((factor ^ (factor >> 13)) | 1), dtype=jnp.uint32)


def _fingerprints(leaves: Mapping[str, jax.Array]) -> list[jax.Array]:
    # One program for each leaf: in one for all, the CPU's compiler keeps a copy of every leaf at once.
    return [_fingerprint(array) for array in leaves.values()]


def _words(array: jax.Array) -> jax.Array:
    """The bits of ``array`` as uint32; narrower elements are widened, wider ones split."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if array.dtype.name in ("int2", "uint2", "int4", "uint4"):
        array = array.astype(jnp.int8)
    unsigned: Any = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """What is known of one array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    fingerprint: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    attempt: int
    """Attempt that saved it."""
    recipe_fingerprint: str
    data_fingerprint: str
    leaves: Mapping[str, Leaf]

    def to_dict(self) -> dict[str, Any]:
        """As JSON data, with a digest over all of it."""
        body = {"format": FORMAT} | dataclasses.asdict(self)
        # Through JSON once, so that tuples are lists and the digest is that of what will be read.
        as_read: dict[str, Any] = json.loads(json.dumps(body))
        return as_read | {"sha256": _digest(as_read)}

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read what :meth:`to_dict` gave.

        Raises:
          Damaged: the text is not exactly what was written.
          UserError: another version of this program wrote it.
        """
        try:
            body = json.loads(text)
            digest = body.pop("sha256")
            if digest != _digest(body):
                raise Damaged("the manifest's own digest does not match")
            version = body.pop("format")
            if version != FORMAT:
                raise UserError(
                    f"the checkpoint has format {version}, this version of the trainer reads {FORMAT}",
                    hint="resume with the version that the run began with",
                )
            leaves = {
                path: Leaf(shape=tuple(leaf["shape"]), dtype=leaf["dtype"], fingerprint=leaf["fingerprint"])
                for path, leaf in body.pop("leaves").items()
            }
            return cls(leaves=leaves, **body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"the manifest cannot be read ({error})") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def describe(leaves: Mapping[str, jax.Array]) -> dict[str, Leaf]:
    """Shape, dtype and fingerprint of every leaf; waits for the arrays."""
    values = _fingerprints(leaves)
    return {
        path: Leaf(shape=tuple(leaf.shape), dtype=str(leaf.dtype), fingerprint=int(value))
        for (path, leaf), value in zip(leaves.items(), values, strict=True)
    }


def altered(leaves: Mapping[str, jax.Array], manifest: Manifest) -> list[str]:
    """Paths of the leaves whose fingerprint is not the manifest's, as any device here sees it.

    A leaf that is replicated was read once for each process, and each copy can be wrong alone: so
    the result of every local device is looked at, not only of the first.
    """
    wrong = []
    for path, value in zip(leaves, _fingerprints(leaves), strict=True):
        seen = {int(np.asarray(shard.data)) for shard in value.addressable_shards}
        if seen != {manifest.leaves[path].fingerprint}:
            wrong.append(path)
    return wrong


def differences(wanted: Mapping[str, Any], manifest: Manifest) -> Sequence[str]:
    """Where the checkpoint's arrays are not those of ``wanted`` (path, shape, dtype), as sentences."""
    found = []
    for path, leaf in wanted.items():
        saved = manifest.leaves.get(path)
        here = f"{leaf.dtype}{list(leaf.shape)}"
        if saved is None:
            found.append(f"{path}: the recipe has {here}, the checkpoint has nothing")
        elif saved.shape != tuple(leaf.shape) or saved.dtype != str(leaf.dtype):
            found.append(
                f"{path}: the recipe has {here}, the checkpoint has {saved.dtype}{list(saved.shape)}"
            )
    extra = [path for path in manifest.leaves if path not in wanted]
    found += [f"{path}: the checkpoint has it, the recipe does not" for path in extra]
    # The optimizer repeats what the parameters show more plainly.
    return sorted(found, key=lambda text: text.startswith("opt_state/"))
