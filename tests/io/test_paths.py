# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import time

import pytest

from tencache_ds.errors import ConfigError, SpaceError, StorageError
from tencache_ds.io import NvmePaths, PosixBackend, StorageTimeoutError
from tencache_ds.io.stripes import Striping
from tencache_ds.io.wrappers.faults import FaultBackend, parse_faults
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
OPTIONS = {
    "preallocate_nbytes": 0,
    "growth_nbytes": 64 * PAGE,
    "n_files": 2,
    "fingerprint": None,
    "timeout_s": 10.0,
}


@pytest.fixture
def roots(tmp_path):
    return [str(tmp_path / name) for name in ("a", "b", "c")]


@pytest.fixture
def nvme():
    opened = []

    def open_backend():
        opened.append(FaultBackend(PosixBackend(n_lanes=2), ()))
        return opened[-1], f"number {len(opened)}"

    nvme = NvmePaths(0, open_backend, Striping)
    nvme.opened = opened
    yield nvme
    for backend in opened:
        backend.inject(())
    nvme.close()


def inject(nvme, rule):
    for path in nvme.paths:
        path.backend.inject(parse_faults(rule))


def fill(store, count, value=1):
    extents = [store.allocate(PAGE, f"t{index}") for index in range(count)]
    for extent in extents:
        store.write(extent, aligned(PAGE, value))
    store.drain()
    return extents


def test_one_path_is_what_it_was(nvme, roots):
    store = nvme.open_store("weights", roots[:1], **OPTIONS)
    (path,) = nvme.paths
    called = [os.path.relpath(name, path.scratch.folder).partition("-rank0-")[2] for name in store.paths]
    assert called == ["weights-0.bin", "weights-1.bin"]
    fill(store, 4)
    nvme.reweigh()
    stats = path.stats()
    assert (stats.path, stats.backend) == (roots[0], "posix")
    assert (stats.nbytes_read, stats.nbytes_written, stats.stored_nbytes) == (0, 4 * PAGE, 4 * PAGE)
    assert stats.write_bytes_per_s > 0
    assert stats.read_bytes_per_s is None
    assert stats.bytes_per_s is None  # nobody needs it, so nobody measures it


def test_stores_share_the_paths_they_have_in_common(nvme, roots):
    weights = nvme.open_store("weights", [roots[0], roots[2]], **OPTIONS)
    optimizer = nvme.open_store("optimizer", [roots[1], roots[2] + "/"], **OPTIONS)
    assert [path.root for path in nvme.paths] == [roots[0], roots[2], roots[1]]
    assert len(nvme.opened) == 3
    fill(weights, 4)
    fill(optimizer, 6)
    contents = {path.root: {part.kind: part.n_extents for part in path.contents()} for path in nvme.paths}
    assert contents == {roots[0]: {"weights": 2}, roots[1]: {"optimizer": 3}, roots[2]: {"weights": 2, "optimizer": 3}}
    assert [path.stats().nbytes_written for path in nvme.paths] == [2 * PAGE, 5 * PAGE, 3 * PAGE]
    assert nvme.stores == [weights, optimizer]


def test_what_is_slow_gets_less(nvme, roots):
    store = nvme.open_store("optimizer", roots[:2], **OPTIONS)
    extents = fill(store, 20)
    inject(nvme, f"kind=delay,seconds=0.15,match={roots[1]}/")
    for _ in range(6):
        nvme.reweigh()
        extents = [store.relocate(extent) for extent in extents]
        for extent in extents:
            store.write(extent, aligned(PAGE, 2))
        store.drain()
    first, second = (path.stats() for path in nvme.paths)
    assert first.bytes_per_s > 3 * second.bytes_per_s
    assert first.stored_nbytes >= 15 * PAGE
    assert store.n_relocated >= 5


def test_a_path_that_hangs_does_not_hold_up_the_others(nvme, roots):
    store = nvme.open_store("optimizer", roots[:2], **OPTIONS)
    extents = fill(store, 8)
    inject(nvme, f"kind=hang,match={roots[0]}/")
    hung = [store.read(extent, aligned(PAGE)) for extent in extents[::2]]
    t_start = time.monotonic()
    for extent in extents[1::2]:
        store.read(extent, aligned(PAGE)).wait()
    assert time.monotonic() - t_start < 5
    with pytest.raises(StorageTimeoutError) as caught:
        hung[0].wait(0.1)
    assert caught.value.__notes__ == [
        f"Of this rank's state, 0.00 GiB of optimizer state in 4 chunks was on {roots[0]}. A run that does not use "
        "this path can resume from the last checkpoint."
    ]
    for backend in nvme.opened:  # gives up what hangs
        with_hung = backend is nvme.paths[0].backend
        if with_hung:
            with pytest.raises(StorageTimeoutError):
                backend.close()


def test_an_error_says_what_was_on_its_path(nvme, roots):
    weights = nvme.open_store("weights", roots[:2], **OPTIONS)
    optimizer = nvme.open_store("optimizer", roots[:2], **OPTIONS)
    fill(weights, 3)
    extents = fill(optimizer, 8)
    inject(nvme, f"kind=eio,op=read,match={roots[1]}/")
    with pytest.raises(StorageError, match="Input/output error") as caught:
        optimizer.read(extents[1], aligned(PAGE)).wait()
    (note,) = caught.value.__notes__
    assert "0.00 GiB of 1 weights and 0.00 GiB of optimizer state in 4 chunks was on " + roots[1] in note
    optimizer.read(extents[0], aligned(PAGE)).wait()
    assert [path.meter.bytes_per_s is None for path in nvme.paths] == [True, True]


def test_an_error_nobody_waited_for_says_it_too(nvme, roots):
    store = nvme.open_store("weights", roots[:1], **OPTIONS)
    (extent,) = fill(store, 1)
    inject(nvme, "kind=eio,op=write")
    ticket = store.write(extent, aligned(PAGE, 2))
    ticket.wait_ended()
    with pytest.raises(StorageError) as caught:
        store.check()
    assert len(caught.value.__notes__) == 1
    with pytest.raises(StorageError) as again:  # of the same cause, told once
        store.read(extent, aligned(PAGE)).wait()
    assert len(again.value.__notes__) == 1


def test_close_ends_every_file_whatever_goes_wrong(roots):
    class Stubborn(PosixBackend):
        def close(self):
            super().close()
            raise StorageError("close", "here", 0, 0, "does not want to")

    nvme = NvmePaths(3, lambda: (Stubborn(n_lanes=1), "why not"), Striping)
    store = nvme.open_store("weights", roots, **OPTIONS)
    assert all("-rank3-" in name for name in store.paths)
    fill(store, 3)
    locations = [store.location(name) for name in store.paths]
    assert all(os.path.exists(location) for location in locations)
    with pytest.raises(StorageError, match="does not want to"):
        nvme.close()
    assert not any(os.path.exists(location) for location in locations)
    assert [os.listdir(root) for root in roots] == [[], [], []]


def test_a_path_that_cannot_be_opened_leaves_the_rest_to_close(nvme, roots):
    with open(roots[1], "w") as file:
        file.write("not a folder")
    with pytest.raises(ConfigError, match=r"nvme_path '.*b' cannot hold scratch files"):
        nvme.open_store("weights", roots, **OPTIONS)
    nvme.close()
    assert os.listdir(roots[0]) == []


def test_without_a_backend_there_is_no_file(roots):
    def no_backend():
        raise ConfigError("nothing works here")

    nvme = NvmePaths(0, no_backend, Striping)
    with pytest.raises(ConfigError, match="nothing works"):
        nvme.open_store("weights", roots, **OPTIONS)
    assert os.listdir(roots[0]) == []
    nvme.close()


def test_too_little_space_names_every_path(nvme, roots):
    with pytest.raises(SpaceError, match=f"none of 2 paths has room.*{roots[0]}.*{roots[1]}"):
        nvme.open_store("optimizer", roots[:2], **OPTIONS | {"preallocate_nbytes": 1 << 55})


def test_a_closed_store_takes_along_the_paths_that_nothing_else_is_on(nvme, roots):
    weights = nvme.open_store("weights", roots[:1], **OPTIONS)
    (extent,) = fill(weights, 1)
    first, second = (nvme.open_store("optimizer", roots[:2], **OPTIONS) for _ in range(2))
    for store in (first, second):
        fill(store, 4)
    assert not set(first.paths) & set(second.paths)
    nvme.close_store(first)
    assert [path.root for path in nvme.paths] == roots[:2]
    fill(second, 4)
    nvme.close_store(second)
    assert [path.root for path in nvme.paths] == roots[:1]
    assert nvme.stores == [weights]
    weights.read(extent, aligned(PAGE, 0)).wait()
    fill(nvme.open_store("optimizer", roots[:2], **OPTIONS), 2)
