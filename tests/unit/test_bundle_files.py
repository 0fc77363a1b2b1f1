"""Which files of a working tree are sent: as git sees them, without secrets and without results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher import bundle_files
from launcher.bundle import make_bundle
from launcher.bundle_files import find_tree, looks_secret
from launcher.git import patch
from recipes.errors import UserError
from tests.unit.bundle_support import GIT_ENV, git, names, repository, skipped, write


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIT_ENV.items():
        monkeypatch.setenv(name, value)


def test_tracked_dirty_and_new_files_but_not_ignored_or_deleted_ones(tmp_path: Path) -> None:
    repo = repository(
        tmp_path, {"a.py": "old", "gone.py": "", "sub/b.py": "b", ".gitignore": "data/\n*.log\n"}
    )
    write(repo, {"a.py": "new", "new.py": "", "data/big.bin": "x", "x.log": "x", "sub/.gitignore": "c\n"})
    write(repo, {"sub/c": ""})
    (repo / "gone.py").unlink()
    assert names(repo) == [".gitignore", "a.py", "new.py", "sub/.gitignore", "sub/b.py"]
    assert make_bundle(repo).archive.count(b"new\0") == 1


def test_a_tracked_file_that_is_ignored_too_is_sent(tmp_path: Path) -> None:
    repo = repository(tmp_path, {"kept.log": "", ".gitignore": "*.log\n"})
    assert names(repo) == [".gitignore", "kept.log"]


def test_all_of_the_repository_from_anywhere_in_it(tmp_path: Path) -> None:
    repo = repository(tmp_path, {"a.py": "", "deep/er/b.py": ""})
    assert find_tree(repo / "deep" / "er") == find_tree(repo)
    assert find_tree(repo).root == repo


@pytest.mark.parametrize(
    ("change", "dirty"),
    [
        (lambda repo: None, False),
        (lambda repo: os.utime(repo / "a.py"), False),
        (lambda repo: write(repo, {"a.py": "other"}), True),
        (lambda repo: write(repo, {"new.py": ""}), True),
        (lambda repo: write(repo, {"ignored": ""}), False),
        (lambda repo: (repo / "a.py").unlink(), True),
        (lambda repo: (repo / "a.py").chmod(0o755), True),
        (lambda repo: git(repo, "rm", "--quiet", "a.py"), True),
        (lambda repo: git(repo, "rm", "--quiet", "--cached", "ignored-later"), True),
    ],
)
def test_dirty_is_what_differs_from_the_commit(tmp_path: Path, change: object, dirty: bool) -> None:
    repo = repository(tmp_path, {"a.py": "a", "ignored-later": "", ".gitignore": "ignored*\n"})
    assert callable(change)
    change(repo)
    bundle = make_bundle(repo)
    assert (bundle.dirty, bundle.commit) == (dirty, git(repo, "rev-parse", "HEAD"))


def test_before_the_first_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, {"a.py": ""})
    bundle = make_bundle(tmp_path)
    assert (bundle.commit, bundle.dirty, bundle.num_files) == (None, True, 1)


def test_outside_git_hidden_folders_caches_and_environments_stay(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.py": "",
            ".hidden-file": "",
            "sub/b.py": "",
            ".cache/c": "",
            "sub/__pycache__/b.pyc": "",
            "env/pyvenv.cfg": "",
            "env/lib/d.py": "",
            "conda/conda-meta/history": "",
        },
    )
    bundle = make_bundle(tmp_path)
    assert names(tmp_path) == [".hidden-file", "a.py", "sub/b.py"]
    assert (bundle.commit, bundle.dirty, bundle.root) == (None, None, tmp_path)


def test_a_submodule_is_sent_as_it_is_and_its_changes_count(tmp_path: Path) -> None:
    library = repository(tmp_path / "library", {"lib.py": "", ".gitignore": "*.log\n"})
    repo = repository(tmp_path / "repo", {"a.py": ""})
    git(repo, "submodule", "--quiet", "add", str(library), "vendor/lib")
    git(repo, "commit", "--quiet", "--message", "submodule")
    assert make_bundle(repo).dirty is False
    write(repo / "vendor/lib", {"new.py": "", "x.log": ""})
    bundle = make_bundle(repo)
    inside = [name for name in names(repo) if name.startswith("vendor/")]
    assert (
        inside == ["vendor/lib/.git", "vendor/lib/.gitignore", "vendor/lib/lib.py", "vendor/lib/new.py"][1:]
    )
    assert bundle.dirty is True


def test_what_is_not_there_to_send_is_named(tmp_path: Path) -> None:
    library = repository(tmp_path / "library", {"lib.py": ""})
    repo = repository(tmp_path / "repo", {"a.py": ""})
    git(repo, "submodule", "--quiet", "add", str(library), "lib")
    git(repo, "submodule", "--quiet", "deinit", "--force", "lib")
    repository(repo / "nested", {"b.py": ""})
    assert names(repo) == [".gitmodules", "a.py"]
    assert skipped(repo) == {
        "lib": "a submodule that is not checked out",
        "nested/": "another git repository",
    }


def test_links_only_where_they_mean_the_same_on_a_host(tmp_path: Path) -> None:
    write(tmp_path, {"outside": "secret", "outside-dir/file": "secret"})
    repo = repository(tmp_path / "repo", {"a.py": "", "sub/b.py": ""})
    for name, target in {
        "inside": "a.py",
        "sub/up": "../a.py",
        "folder": "sub",
        "dangling": "not/there",
        "out": "../outside",
        "folder-out": "../outside-dir",
        "absolute": str(repo / "a.py"),
        "round": "sub/../../repo/a.py",
        "through": "folder-out/../outside",
        "self": "self",
    }.items():
        (repo / name).symlink_to(target)
    assert names(repo) == ["a.py", "dangling", "folder", "inside", "self", "sub/b.py", "sub/up"]
    assert set(skipped(repo)) == {"absolute", "folder-out", "out", "round", "through"}
    assert b"secret" not in make_bundle(repo).archive


def test_a_folder_that_became_a_link_is_a_link(tmp_path: Path) -> None:
    write(tmp_path, {"elsewhere/b.py": "secret"})
    repo = repository(tmp_path / "repo", {"a.py": "", "sub/b.py": ""})
    (repo / "sub" / "b.py").unlink()
    (repo / "sub").rmdir()
    (repo / "sub").symlink_to(tmp_path / "elsewhere")
    assert names(repo) == ["a.py"]
    assert skipped(repo) == {"sub": "a link out of the tree"}


def test_pipes_and_sockets_are_no_code(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": ""})
    os.mkfifo(tmp_path / "pipe")
    assert names(tmp_path) == ["a.py"]
    assert skipped(tmp_path) == {"pipe": "neither a file nor a link"}


SECRETS = [
    ".env", ".env.local", "prod.env", "sub/.ENV", "key.pem", "tls.key", "id_rsa", "id_ed25519_work", ".netrc",
    "credentials.json", "my-credentials-2.json", "application_default_credentials.json", "kubeconfig",
    "x-service-account-1.json", "service_account.json", "client_secret_12.json", ".ssh/config", ".kube/c",
    ".aws/config", ".docker/config.json", ".git-credentials", ".npmrc", ".pypirc", "terraform.tfstate",
    "hf.token", "secrets.yaml", "a/.config/gcloud/x.db",
]  # fmt: skip
HARMLESS = [
    ".env.example", ".env.template", "id_rsa.pub", "environment.py", "keys.py", "pem.py", "tokenizer.json",
    "credentials.py", "service_account.py", "kube/config.yaml", "secrets.py", "model.json", "env/a.py",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_known_by_name(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_their_likes_are_not(name: str) -> None:
    assert not looks_secret(name)


def test_untracked_secrets_are_left_out_and_named(tmp_path: Path) -> None:
    repo = repository(tmp_path, {"a.py": ""})
    write(repo, {".env": "TOKEN=canary", "sub/key.pem": "canary"})
    bundle = make_bundle(repo)
    assert skipped(repo) == {".env": "looks like a secret", "sub/key.pem": "looks like a secret"}
    assert bundle.num_files == 1
    assert b"canary" not in bundle.archive


def test_committed_files_with_such_names_are_sent_but_not_with_changes(tmp_path: Path) -> None:
    repo = repository(tmp_path, {"a.py": "", "tests/server.pem": "for tests"})
    assert names(repo) == ["a.py", "tests/server.pem"]
    write(repo, {"tests/server.pem": "a real one"})
    with pytest.raises(UserError, match=r"tests/server\.pem looks like a secret") as caught:
        make_bundle(repo)
    assert "git rm --cached" in caught.value.hint
    git(repo, "rm", "--quiet", "--cached", "tests/server.pem")
    assert names(repo) == ["a.py"]


def test_a_staged_secret_is_refused_before_the_first_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, {".env": ""})
    git(tmp_path, "add", "--force", ".env")
    with pytest.raises(UserError, match="looks like a secret"):
        make_bundle(tmp_path)


def test_run_directories_and_bundles_in_the_tree_are_no_code(tmp_path: Path) -> None:
    repo = repository(tmp_path, {"a.py": "", "lock.json": "mine"})
    before = make_bundle(repo).sha256
    run = "runs/quickstart"
    write(repo, {f"{run}/recipe.yaml": "", f"{run}/lock.json": "{}", f"{run}/checkpoints/5/data": "x"})
    write(repo, {"runs/.bundles/abc.tar.gz": "x"})
    assert make_bundle(repo).sha256 == before


def test_variables_of_a_calling_hook_do_not_lead_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other", {"other.py": ""})
    repo = repository(tmp_path / "repo", {"a.py": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert names(repo) == ["a.py"]


def test_nothing_of_the_repository_is_run_or_changed(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "a", ".gitattributes": "*.py diff=evil\n"})
    hook = tmp_path / "evil"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    for name in ("post-index-change", "fsmonitor-watchman"):
        (repo / ".git" / "hooks" / name).symlink_to(hook)
    for key in ("core.fsmonitor", "diff.external", "diff.evil.textconv", "diff.evil.command", "core.pager"):
        git(repo, "config", key, str(hook))
    write(repo, {"a.py": "changed"})
    # Git would note in its index that this one only looks changed.
    os.utime(repo / ".gitattributes", (1, 1))
    index = (repo / ".git" / "index").read_bytes()
    assert names(repo) == [".gitattributes", "a.py"]
    assert (repo / ".git" / "index").read_bytes() == index
    assert b"+changed" in patch(repo)
    assert not (tmp_path / "ran").exists()


def test_a_broken_repository_is_no_folder_without_git(tmp_path: Path) -> None:
    write(tmp_path, {".git/nothing": "", "a.py": ""})
    with pytest.raises(UserError, match="git rev-parse failed"):
        make_bundle(tmp_path)


def test_no_git_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, {"a.py": ""})
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="cannot run git") as caught:
        make_bundle(tmp_path)
    assert caught.value.hint == "install git"


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {f"{number}.txt": "" for number in range(4)})
    monkeypatch.setattr(bundle_files, "MAX_FILES", 3)
    with pytest.raises(UserError, match="more than 3 files"):
        make_bundle(tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        make_bundle(tmp_path / "nothing")


@pytest.mark.parametrize("folder", ["/", "/proc", "/proc/self", "/sys", "/dev"])
def test_a_folder_of_everything_is_no_code(folder: str) -> None:
    if not Path(folder).is_dir():
        pytest.skip(f"there is no {folder} here")
    with pytest.raises(UserError, match=r"the code of this launch would be all of /") as caught:
        find_tree(Path(folder))
    assert "start in the folder with the code" in caught.value.hint


def test_the_home_folder_is_code_only_as_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a.py": "", "project/b.py": ""})
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="the code of this launch would be all of"):
        find_tree(tmp_path)
    assert names(tmp_path / "project") == ["b.py"]
    repo = repository(tmp_path / "other", {"a.py": ""})
    monkeypatch.setenv("HOME", str(repo))
    assert names(repo) == ["a.py"]
