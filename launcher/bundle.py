"""The code of a launch: the working tree as one archive, named by its content, in the bucket.

    bundle = make_bundle(Path.cwd())                    # no network; same files, same digest
    upload(open_storage(recipe.run.root), bundle)       # False when it is there already
    folder = fetch(storage, bundle.digest, Path("/code"))  # on a host: verified, then extracted

The digest is that of the tar file. The object is its gzip, which may differ between zlib versions
without becoming other code. See docs/code.md.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.bundle_files import MAX_FILES, Skipped, Source, Tree, find_tree, shown
from launcher.storage_types import Exists, NotFound, Storage
from launcher.text import one_line
from recipes.contract import BUNDLES
from recipes.errors import UserError

LIMIT_BYTES = 64 * 2**20
"""Of all files together: code, not data."""
MAX_LIMIT_BYTES = 512 * 2**20
"""The limit may be raised to this; a host holds the archive in memory."""
ARCHIVE_LIMIT_BYTES = MAX_LIMIT_BYTES + MAX_FILES * 4096
"""What a host unpacks at most: files and their headers."""
NUM_LARGEST = 5
NUM_LEFT_OUT = 5
"""Named, of what is not sent."""
GZIP_LEVEL = 4
"""A quarter of the time of the highest level, for 4 % more bytes of source code."""

_MTIME_S = 315_532_800
"""1980-01-01: the earliest that zip files, and so wheels, can hold."""
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """The code around one folder."""

    sha256: str
    """Hexadecimal, of the archive."""
    archive: bytes = field(repr=False)
    """A tar file, not compressed."""
    size_bytes: int
    """Of all files together."""
    num_files: int
    """Symbolic links included."""
    root: Path
    commit: str | None
    """None outside git and before the first commit."""
    dirty: bool | None
    """Whether it differs from the commit; None outside git."""
    skipped: Sequence[Skipped]
    """What is not in it and might be missed."""

    @property
    def digest(self) -> str:
        """As the environment of pods and lock.json name it."""
        return f"sha256:{self.sha256}"


def make_bundle(folder: Path, *, limit_bytes: int = LIMIT_BYTES) -> Bundle:
    """The working tree around ``folder`` as it is now.

    Args:
      folder: anywhere in the tree; in a git repository all of the repository is taken.
      limit_bytes: how large all files may be together, at most MAX_LIMIT_BYTES.

    Raises:
      UserError: a file cannot be read, there are none, or they are too large; the largest are named.
    """
    tree = find_tree(folder)
    _check_size(tree, min(limit_bytes, MAX_LIMIT_BYTES))
    archive = _pack(tree)
    return Bundle(
        sha256=hashlib.sha256(archive).hexdigest(),
        archive=archive,
        size_bytes=sum(source.size_bytes for source in tree.files),
        num_files=len(tree.files),
        root=tree.root,
        commit=tree.commit,
        dirty=tree.dirty,
        skipped=tree.skipped,
    )


def left_out(skipped: Sequence[Skipped]) -> Sequence[str]:
    """What is not in a bundle and might be missed, for people."""
    more = len(skipped) - NUM_LEFT_OUT
    lines = [f"not sent to the hosts: {each}" for each in skipped[:NUM_LEFT_OUT]]
    return [*lines, f"not sent to the hosts: {more:,} more"] if more > 0 else lines


def is_uploaded(storage: Storage, digest: str) -> bool:
    """Whether hosts find a bundle at ``run.root``; one small request."""
    return storage.exists(bundle_path(digest))


def upload(storage: Storage, bundle: Bundle) -> bool:
    """Puts a bundle where hosts fetch it from; False when it was there already (ask ``is_uploaded`` first).

    Args:
      storage: at ``run.root``.
      bundle: what to put there.
    """
    packed = gzip.compress(bundle.archive, GZIP_LEVEL, mtime=0)
    try:
        storage.create(bundle_path(bundle.digest), packed)
    except Exists:
        return False
    return True


def fetch(storage: Storage, digest: str, into: Path) -> Path:
    """The folder with a bundle's files, ``<into>/<sha256>``: made whole or not at all, and only once.

    Args:
      storage: at ``run.root``.
      digest: ``sha256:<hex>``.
      into: a local folder; made when it is missing.

    Raises:
      UserError: it is not there, or not what the digest says, or cannot be extracted safely.
    """
    path = bundle_path(digest)
    target = into / digest.removeprefix("sha256:")
    if target.is_dir():
        return target
    where = f"{storage.url}/{path}"
    try:
        packed = storage.read(path, limit_bytes=ARCHIVE_LIMIT_BYTES)
    except NotFound as error:
        raise UserError(
            f"the code of this run is gone: {where} does not exist",
            hint="launch again from the working tree; that sends the code anew",
        ) from error
    archive = _unpacked(packed, where)
    if hashlib.sha256(archive).hexdigest() != target.name:
        raise _damaged(where, "its content has another digest")
    _extract(archive, target, where)
    return target


def bundle_path(digest: str) -> str:
    """Name of a bundle's object below ``run.root``.

    Raises:
      UserError: ``digest`` is none.
    """
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise UserError(
            f"{digest[:100]!r} is not the digest of a bundle", hint="it looks like sha256:<64 hex>"
        )
    return f"{BUNDLES}/{match[1]}.tar.gz"


# Packing


def _check_size(tree: Tree, limit_bytes: int) -> None:
    if not tree.files:
        raise UserError(
            f"{tree.root} has no files to send to the hosts", hint="start in the folder with the code"
        )
    size_bytes = sum(source.size_bytes for source in tree.files)
    if size_bytes <= limit_bytes:
        return
    largest = sorted(tree.files, key=lambda source: -source.size_bytes)[:NUM_LARGEST]
    lines = [f"  {_mib(source.size_bytes):>9}  {shown(source.name)}" for source in largest]
    fix = "name what the hosts do not need in .gitignore"
    raise UserError(
        f"the {len(tree.files):,} files of {tree.root} have {_mib(size_bytes)}, more than the"
        f" {_mib(limit_bytes)} that are sent to the hosts; the largest:\n" + "\n".join(lines),
        hint=f"{fix} (and `git rm --cached` what is tracked)"
        if tree.dirty is not None
        else f"run `git init`, then {fix}",
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _pack(tree: Tree) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w:", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for source in tree.files:
            _add(tar, tree.root, source)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, root: Path, source: Source) -> None:
    info = tarfile.TarInfo(source.name)
    info.mtime = _MTIME_S
    if source.link is not None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, source.link, 0o777
        tar.addfile(info)
        return
    content = _content(os.path.join(root, source.name))
    info.size, info.mode = len(content), 0o755 if source.executable else 0o644
    tar.addfile(info, io.BytesIO(content))


def _content(path: str) -> bytes:
    try:
        # Listed as a plain file a moment ago; if it is a link by now, it is not followed.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(MAX_LIMIT_BYTES)
    except FileNotFoundError as error:
        raise UserError(f"{shown(path)} vanished while it was read", hint="try again") from error
    except OSError as error:
        raise UserError(
            f"cannot read {shown(path)}: {error.strerror}",
            hint="make it readable, or name it in .gitignore",
        ) from error


# Extracting


def _damaged(where: str, reason: str) -> UserError:
    return UserError(
        f"{where} is damaged or was replaced: {reason}",
        hint="delete it and launch again from the working tree; that sends the code anew",
    )


def _unpacked(packed: bytes, where: str) -> bytes:
    stream = zlib.decompressobj(_GZIP)
    try:
        archive = stream.decompress(packed, ARCHIVE_LIMIT_BYTES + 1)
    except zlib.error as error:
        raise _damaged(where, f"not gzip ({error})") from error
    if len(archive) > ARCHIVE_LIMIT_BYTES:
        raise _damaged(where, f"it holds more than {_mib(ARCHIVE_LIMIT_BYTES)}")
    if not stream.eof or stream.unused_data:
        raise _damaged(where, "it is cut off or has something behind it")
    return archive


def _extract(archive: bytes, target: Path, where: str) -> None:
    """Into a folder beside ``target``, then renamed; of processes that race, one makes it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:12]}-", dir=target.parent))
    except OSError as error:
        raise _cannot_write(target.parent, error) from error
    try:
        _extract_into(archive, temporary)
        temporary.chmod(0o755)
        temporary.rename(target)
    except (tarfile.TarError, RecursionError, ValueError, OverflowError) as error:
        raise _damaged(where, one_line(str(error))) from error
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not target.is_dir():
            raise _cannot_write(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write the code to {path}: {error.strerror or error}",
        hint="free some space, or make it writable",
    )


def _extract_into(archive: bytes, folder: Path) -> None:
    with tarfile.open(
        fileobj=io.BytesIO(archive), mode="r:", encoding="utf-8", errors="surrogateescape"
    ) as tar:
        members = tar.getmembers()
        _check_members(members, len(archive))
        tar.extractall(folder, members, filter="data")
    for member in members:
        # One link can be harmless until another one exists.
        path = os.path.join(folder, member.name)
        if member.issym() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise tarfile.LinkOutsideDestinationError(member, os.path.realpath(path))


def _check_members(members: Sequence[tarfile.TarInfo], size_bytes: int) -> None:
    """Only what :func:`make_bundle` writes: plain files and links, each once, none behind another."""
    names = {member.name for member in members}
    if len(names) < len(members):
        raise ValueError("an entry is there twice")
    for member in members:
        parts = member.name.split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in member.name:
            raise ValueError(f"{member.name!r} is not a plain relative name")
        is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
        if not is_file and not member.issym():
            raise ValueError(f"{member.name!r} is neither a file nor a symbolic link")
        if any("/".join(parts[:count]) in names for count in range(1, len(parts))):
            raise ValueError(f"{member.name!r} is behind another entry")
    if sum(member.size for member in members) > size_bytes:
        raise ValueError("its files are larger than the archive")
