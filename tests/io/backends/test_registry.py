# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tencache_ds.config import IoBackend
from tencache_ds.errors import ConfigError
from tencache_ds.io import BACKENDS, BackendSettings, open_backend
from tencache_ds.io.backends import registry
from tencache_ds.io.backends.registry import BackendEntry, may_need_pinned_buffers
from tencache_ds.ops import tencache_aio

pytestmark = pytest.mark.timeout(300)  # the first run builds the ops

PINNED = BackendSettings(buffers_are_pinned=True, n_lanes=2)
NOT_PINNED = BackendSettings(buffers_are_pinned=False, n_lanes=2)


def test_the_option_names_the_same_backends():
    assert [kind.value for kind in IoBackend] == [registry.AUTO, *BACKENDS]


def test_entries_open_what_they_name():
    for name, entry in BACKENDS.items():
        backend = entry.open(PINNED)
        assert backend.name == entry.name == name
        backend.close()


def test_what_is_asked_for_is_opened():
    for kind in BACKENDS:
        backend, reason = open_backend(kind, NOT_PINNED)
        assert (backend.name, reason) == (kind, "asked for")
        backend.close()
    with pytest.raises(ConfigError, match='^io_backend must be "auto", "native", "aio" or "posix", not \'uring\'$'):
        open_backend("uring", PINNED)


def test_auto_takes_the_first_that_works(monkeypatch):
    backend, reason = open_backend("auto", NOT_PINNED)
    assert (backend.name, reason) == ("native", "the native op loads")
    backend.close()
    monkeypatch.setattr(tencache_aio, "load_op", refuse)
    with pytest.raises(ConfigError, match="no compiler"):
        open_backend("native", PINNED)
    without_native = "native does not work here: no compiler; "
    backend, reason = open_backend("auto", NOT_PINNED)
    assert backend.name == "posix"
    assert reason == without_native + "the buffers are not pinned, which aio would have to copy"
    backend.close()
    backend, reason = open_backend("auto", PINNED)
    assert backend.name == "aio"
    assert reason == without_native + "DeepSpeed's async_io op loads and the buffers are pinned"
    backend.close()


def refuse(builder, op_name):
    raise ConfigError("no compiler")


def test_a_backend_is_one_entry(monkeypatch):
    posix = BACKENDS["posix"]
    uring = BackendEntry("uring", posix.open, reason="io_uring is allowed")
    monkeypatch.setattr(registry, "BACKENDS", {"uring": uring, "posix": posix})
    for kind, wanted in (("uring", "asked for"), ("auto", "io_uring is allowed")):
        backend, reason = open_backend(kind, NOT_PINNED)
        assert reason == wanted
        backend.close()
    with pytest.raises(ConfigError, match='must be "auto", "uring" or "posix", not'):
        open_backend("native", PINNED)
    assert not may_need_pinned_buffers("auto")


def test_what_keeps_the_last_one_from_working_is_an_error(monkeypatch):
    def fail(settings):
        raise ConfigError("no threads")

    monkeypatch.setattr(registry, "BACKENDS", {"posix": BackendEntry("posix", fail)})
    with pytest.raises(ConfigError, match="^no threads$"):
        open_backend("auto", PINNED)


def test_who_needs_pinned_buffers():
    assert {kind for kind in IoBackend if may_need_pinned_buffers(kind.value)} == {"auto", "aio"}
