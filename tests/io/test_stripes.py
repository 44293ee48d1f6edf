# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os

import pytest

from tencache_ds.errors import SpaceError, StorageError
from tencache_ds.io.scratch import SpaceFiles
from tencache_ds.io.stripes import StripedSpace, Striping

PAGE = 4096
MIB = 1 << 20


class Device:
    """Folders with a limit on the total size of their files."""

    def __init__(self, monkeypatch):
        self.limits = {}
        self._used = {}
        real_allocate, real_free = os.posix_fallocate, SpaceFiles.device_nbytes

        def allocate(fd, offset, nbytes):
            folder = os.path.dirname(os.readlink(f"/proc/self/fd/{fd}"))
            if folder in self.limits:
                if self.used(folder) + nbytes > self.limits[folder]:
                    raise OSError(errno.ENOSPC, "No space left on device")
                self._used[folder] = self.used(folder) + nbytes
            real_allocate(fd, offset, nbytes)

        def free(files):
            folder = os.path.dirname(next(iter(files._files)))
            if folder not in self.limits:
                return real_free(files)
            return self.limits[folder] - self.used(folder), self.limits[folder]

        monkeypatch.setattr(os, "posix_fallocate", allocate)
        monkeypatch.setattr(SpaceFiles, "device_nbytes", free)

    def used(self, folder):
        return self._used.get(folder, 0)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


@pytest.fixture
def folders(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for folder in paths:
        folder.mkdir()
    return [str(folder) for folder in paths]


def make(folders, *, preallocate_nbytes=0, growth_nbytes=4 * PAGE, n_files=2):
    files = [[f"{folder}/{index}" for index in range(n_files)] for folder in folders]
    placement = Striping(len(folders))
    return StripedSpace(files, placement, preallocate_nbytes=preallocate_nbytes, growth_nbytes=growth_nbytes)


def size(space, folder):
    """Bytes of both files on a path."""
    return sum(os.fstat(space.descriptor(f"{folder}/{index}")).st_size for index in range(2))


def folder_of(place):
    return os.path.dirname(place[0])


def test_ranges_take_turns_and_are_reserved(folders):
    space = make(folders)
    places = [space.take(PAGE, "t") for _ in range(6)]
    assert [folder_of(place) for place in places] == folders * 2
    assert space.held() == [(2, 2 * PAGE)] * 3
    assert space.nbytes_taken == 6 * PAGE
    assert space.nbytes == sum(size(space, folder) for folder in folders)
    assert all(os.fstat(space.descriptor(place[0])).st_blocks * 512 >= PAGE for place in places)
    space.give(*places[0], PAGE)
    assert space.held() == [(1, PAGE), (2, 2 * PAGE), (2, 2 * PAGE)]
    assert space.take(PAGE, "t") == places[0]
    space.close()
    assert [os.listdir(folder) for folder in folders] == [[], [], []]


def test_a_preallocation_is_shared(folders):
    space = make(folders[:2], preallocate_nbytes=16 * PAGE)
    assert [size(space, folder) for folder in folders[:2]] == [8 * PAGE] * 2
    space.close()


def test_a_small_path_leaves_its_share_to_the_others(folders, device):
    device.limits[folders[1]] = 6 * PAGE
    space = make(folders, preallocate_nbytes=30 * PAGE, n_files=1)
    assert device.used(folders[1]) == 6 * PAGE
    assert space.nbytes == 30 * PAGE
    assert len([space.take(PAGE, "t") for _ in range(30)]) == 30
    assert space.held()[1] == (6, 6 * PAGE)
    space.close()


def test_a_real_small_device_leaves_its_share_to_the_others(folders, small_device):
    space = make([folders[0], str(small_device)], preallocate_nbytes=8 * MIB)
    assert len([space.take(16 * PAGE, "t") for _ in range(128)]) == 128
    (n_large, _), (n_small, _) = space.held()
    assert 8 <= n_small <= 16
    assert n_large + n_small == 128
    space.close()


def test_a_path_that_was_filled_by_somebody_else_meanwhile_leaves_its_share_too(folders, device, monkeypatch):
    device.limits[folders[0]] = 2 * PAGE
    monkeypatch.setattr(SpaceFiles, "device_nbytes", lambda files: (MIB, MIB))
    space = make(folders[:2], preallocate_nbytes=30 * PAGE, n_files=1)
    assert space.nbytes == 30 * PAGE
    assert device.used(folders[0]) == 0
    space.close()


def test_all_paths_full_says_so_and_leaves_no_file(folders, device):
    for folder in folders:
        device.limits[folder] = 4 * PAGE
    with pytest.raises(SpaceError, match="preallocation failed.*none of 3 paths has room for .* more bytes") as caught:
        make(folders, preallocate_nbytes=30 * PAGE, n_files=1)
    assert caught.value.errno == errno.ENOSPC
    assert all(f"free at {folder}" in str(caught.value) for folder in folders)
    assert [os.listdir(folder) for folder in folders] == [[], [], []]


def test_a_full_path_is_not_asked_again_until_the_next_step(folders, device, monkeypatch):
    device.limits[folders[0]] = 2 * PAGE
    space = make(folders[:2], growth_nbytes=PAGE, n_files=1)
    for _ in range(6):
        space.take(PAGE, "t")
    assert space.held() == [(2, 2 * PAGE), (4, 4 * PAGE)]
    device.limits[folders[0]] = 20 * PAGE
    assert folder_of(space.take(PAGE, "t")) == folders[1]
    space.reweigh([None, None])
    assert folder_of(space.take(PAGE, "t")) == folders[0]
    device.limits = dict.fromkeys(folders, 0)
    with pytest.raises(SpaceError, match="none of 2 paths"):
        space.take(64 * PAGE, "big")
    space.close()


def test_ranges_move_to_the_faster_path_and_no_further(folders):
    space = make(folders[:2], n_files=1)
    places = [space.take(PAGE, "t") for _ in range(40)]
    for _ in range(10):
        space.reweigh([3e9, 1e9])
        for index, place in enumerate(places):
            moved = space.take_elsewhere(place[0], PAGE, "t")
            if moved is not None:
                assert folder_of(moved) != folder_of(place)
                space.give(*place, PAGE)
                places[index] = moved
    assert space.n_moved == pytest.approx(10, abs=1)
    assert space.held()[0][0] == pytest.approx(30, abs=1)
    assert len(set(places)) == 40
    space.close()


def test_nothing_moves_where_there_is_no_room(folders, device):
    device.limits[folders[0]] = 20 * PAGE
    space = make(folders[:2], growth_nbytes=PAGE, n_files=1)
    places = [space.take(PAGE, "t") for _ in range(40)]
    for _ in range(5):
        space.reweigh([3e9, 1e9])
        assert [space.take_elsewhere(place[0], PAGE, "t") for place in places] == [None] * 40
    assert space.n_moved == 0
    # Room that turns out not to be there:
    device.limits[folders[0]] = 60 * PAGE
    space.reweigh([3e9, 1e9])
    device.limits[folders[0]] = 20 * PAGE
    assert [space.take_elsewhere(place[0], PAGE, "t") for place in places] == [None] * 40
    assert space.held() == [(20, 20 * PAGE)] * 2
    space.close()


def test_moves_leave_a_part_of_the_device_free(folders, device):
    device.limits[folders[0]] = 100 * PAGE
    space = make(folders[:2], growth_nbytes=PAGE, n_files=1)
    places = [space.take(PAGE, "t") for _ in range(150)]
    for _ in range(12):
        space.reweigh([1e11, 1e9])
        for index, place in enumerate(places):
            moved = space.take_elsewhere(place[0], PAGE, "t")
            if moved is not None:
                space.give(*place, PAGE)
                places[index] = moved
    assert 90 < device.used(folders[0]) / PAGE <= 95
    space.close()


def test_a_device_that_is_gone_gets_nothing_more(folders, monkeypatch):
    space = make(folders[:2], n_files=1)
    places = [space.take(PAGE, "t") for _ in range(8)]

    def gone(files):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SpaceFiles, "device_nbytes", gone)
    space.reweigh([1e9, 1e6])
    moved = [space.take_elsewhere(place[0], PAGE, "t") for place in places]
    assert all(place is None or folder_of(place) == folders[0] for place in moved)
    space.close()


def test_an_error_other_than_a_full_device_is_raised(folders, monkeypatch):
    space = make(folders[:2])

    def broken(fd, offset, nbytes):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        space.take(PAGE, "t")
    assert not isinstance(caught.value, SpaceError)
    space.close()
