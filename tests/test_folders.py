"""The folder of compiled code: where it is, and that a place which others could write is refused."""

import os
import stat

import pytest

from dsv4lib import folders
from dsv4lib.folders import CacheError, cache_root, own_folder


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for value, expected in (("", tmp_path / "xdg/dsv4"), (str(tmp_path / "own"), tmp_path / "own"), ("off", None)):
        monkeypatch.setenv("DSV4_CACHE", value)
        assert cache_root() == expected
    monkeypatch.delenv("DSV4_CACHE")
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_root() == tmp_path / "home/.cache/dsv4"


def test_both_caches_are_there(tmp_path, monkeypatch):
    from dsv4lib.emulator.native import library
    from dsv4lib.ops.common import compile_cache

    monkeypatch.delenv("DSV4_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.default.__wrapped__().folder == tmp_path / "dsv4"
    assert library.cache_folder() == tmp_path / "dsv4" / "native"


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o022, 0o077])
def test_what_is_made_is_private_under_any_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        made = own_folder(tmp_path / ".cache" / "dsv4" / "native")
        again = own_folder(made)
    finally:
        os.umask(before)
    assert made == again == tmp_path / ".cache" / "dsv4" / "native"
    assert {stat.S_IMODE(p.stat().st_mode) for p in (made, made.parent, made.parent.parent)} == {0o700}


@pytest.mark.parametrize("below", ["", "below", "far/below"])
@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777])
def test_what_others_may_write_is_refused_with_the_fix(tmp_path, mode, below):
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(CacheError) as error:
        own_folder(place / below)
    assert f"others may write {place}, mode d{stat.filemode(mode)[1:]} (chmod go-w {place}, or" in str(error.value)
    assert "\n" not in str(error.value)


def test_sticky_folders_are_good_above_and_no_cache_themselves(tmp_path):
    sticky = tmp_path / "sticky"  # as /tmp: no user can replace what another has put there
    sticky.mkdir()
    sticky.chmod(0o1777)
    assert own_folder(sticky / "own") == sticky / "own"
    with pytest.raises(CacheError, match="others may write"):
        own_folder(sticky)


def test_what_belongs_to_another_user_is_refused(tmp_path, monkeypatch):
    folder = own_folder(tmp_path / "own")
    monkeypatch.setattr(folders.os, "getuid", lambda: 12345)
    with pytest.raises(CacheError, match="belongs to user .*DSV4_CACHE=off") as error:
        own_folder(folder)
    assert "chmod" not in str(error.value)


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing" / "target")
    for path, says in (("file", "File exists"), ("file/below", "Not a directory"), ("nowhere", "File exists")):
        with pytest.raises(CacheError, match=says):
            own_folder(tmp_path / path)


def test_a_link_is_followed_once(tmp_path):
    """The target of a link counts, and callers go on with its path: changing the link changes nothing for them."""
    real, open_to_all = tmp_path / "real", tmp_path / "open"
    for place in (real, open_to_all):
        place.mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(real)
    assert own_folder(link / "cache") == real / "cache"
    link.unlink()
    link.symlink_to(open_to_all)
    with pytest.raises(CacheError, match=f"others may write {open_to_all}"):
        own_folder(link / "cache")
