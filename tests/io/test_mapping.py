# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import ExtentStore, PosixBackend
from tencache_ds.io.mapping import map_pieces
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


def make_file(path: Path, nbytes: int, seed: int) -> bytes:
    data = bytes(aligned(nbytes, fill=None, seed=seed).numpy())
    path.write_bytes(data)
    return data


def mappings(*paths: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if any(str(p) in line for p in paths)]


def test_pieces_of_several_files_in_order(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    a, b = make_file(first, 5 * PAGE, 1), make_file(second, 3 * PAGE + 100, 2)
    pieces = [
        (str(second), 2 * PAGE, PAGE),
        (str(first), 0, 2 * PAGE),
        (str(first), 4 * PAGE, PAGE),
        (str(second), 3 * PAGE, 100),
    ]
    mapped = map_pieces(pieces)
    assert mapped.dtype is torch.uint8
    assert mapped.shape == (4 * PAGE + 100,)
    expected = b[2 * PAGE : 3 * PAGE] + a[: 2 * PAGE] + a[4 * PAGE :] + b[3 * PAGE :]
    assert mapped.numpy().tobytes() == expected


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 300 * PAGE + 4])
def test_any_length_at_the_end(tmp_path, nbytes):
    data = make_file(tmp_path / "file", nbytes + 7, 3)
    assert map_pieces([(str(tmp_path / "file"), 0, nbytes)]).numpy().tobytes() == data[:nbytes]


def test_the_same_piece_twice(tmp_path):
    data = make_file(tmp_path / "file", PAGE, 3)
    piece = (str(tmp_path / "file"), 0, PAGE)
    assert map_pieces([piece, piece]).numpy().tobytes() == data * 2


@pytest.mark.parametrize("pieces", [[], [("nowhere", 0, 0)]])
def test_nothing_to_map(pieces):
    mapped = map_pieces(pieces)
    assert mapped.dtype is torch.uint8
    assert mapped.numel() == 0


def test_changes_stay_in_the_mapping(tmp_path):
    data = make_file(tmp_path / "file", 2 * PAGE, 4)
    pieces = [(str(tmp_path / "file"), 0, 2 * PAGE)]
    mapped, other = map_pieces(pieces), map_pieces(pieces)
    mapped.view(torch.float32).fill_(1.5)
    assert bool((mapped.view(torch.float32) == 1.5).all())
    assert other.numpy().tobytes() == data
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize(
    "pieces", [[(1, PAGE)], [(PAGE - 1, PAGE)], [(0, PAGE + 4), (2 * PAGE, PAGE)], [(0, PAGE), (100, PAGE)]]
)
def test_unaligned_pieces_are_refused(tmp_path, pieces):
    path = tmp_path / "file"
    make_file(path, 4 * PAGE, 5)
    with pytest.raises(ValueError, match="not page aligned") as caught:
        map_pieces([(str(path), offset, nbytes) for offset, nbytes in pieces])
    assert str(path) in str(caught.value)
    assert not mappings(path)


def test_a_file_that_is_too_short(tmp_path):
    long, short = tmp_path / "long", tmp_path / "short"
    make_file(long, 2 * PAGE, 6)
    make_file(short, PAGE, 6)
    with pytest.raises(StorageError, match="the file ends before the piece does") as caught:
        map_pieces([(str(long), 0, 2 * PAGE), (str(short), 0, PAGE + 1)])
    assert (caught.value.operation, caught.value.path, caught.value.nbytes) == ("map", str(short), PAGE + 1)
    assert not mappings(long, short)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(StorageError, match="No such file") as caught:
        map_pieces([(str(tmp_path / "missing"), 0, PAGE)])
    assert caught.value.errno == 2


def test_the_mapping_ends_with_its_last_tensor(tmp_path):
    path = tmp_path / "file"
    data = make_file(path, 4 * PAGE, 7)
    mapped = map_pieces([(str(path), 0, 4 * PAGE)])
    view = mapped.view(torch.int32)[10:]
    assert mappings(path)
    del mapped
    gc.collect()
    assert mappings(path)
    assert view.numpy().tobytes() == data[40:]
    del view
    gc.collect()
    assert not mappings(path)


def test_it_outlives_the_file(tmp_path):
    """The store removes its file when it is closed; a tensor that is still being saved must stay readable."""
    path = tmp_path / "file"
    data = make_file(path, 2 * PAGE, 8)
    mapped = map_pieces([(str(path), 0, 2 * PAGE)])
    path.unlink()
    assert mapped.numpy().tobytes() == data


def test_it_can_be_read_until_the_process_ends(tmp_path):
    path = tmp_path / "file"
    make_file(path, PAGE, 9)
    code = (
        "import atexit, sys\n"
        "kept = []\n"
        "atexit.register(lambda: print(int(kept[0].sum())))\n"  # registered first, so run last
        "from tencache_ds.io.mapping import map_pieces\n"
        "kept.append(map_pieces([(sys.argv[1], 0, 4096)]))"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, f"{sum(path.read_bytes())}\n"), done.stderr


def test_torch_saves_it(tmp_path):
    data = make_file(tmp_path / "file", 3 * PAGE + 8, 10)
    mapped = map_pieces([(str(tmp_path / "file"), 0, 3 * PAGE + 8)]).view(torch.int32)
    torch.save(mapped, tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt").numpy().tobytes() == data


def test_each_rewrite_by_the_store_is_seen(tmp_path):
    """Writes bypass the page cache, mappings read through it: what an earlier mapping cached must not be seen again."""
    backend = PosixBackend(n_lanes=2, request_nbytes=64 << 10)
    store = ExtentStore(str(tmp_path / "store.bin"), backend, growth_nbytes=1 << 20, timeout_s=20)
    extents = [store.allocate(nbytes, f"t{nbytes}") for nbytes in (3 * PAGE, 70 * PAGE, PAGE + 12)]
    kept = None
    try:
        for round_ in range(5):
            data = [
                aligned(extent.allocated_nbytes, fill=None, seed=10 * round_ + i) for i, extent in enumerate(extents)
            ]
            for extent, buffer in zip(extents, data, strict=True):
                store.write(extent, buffer)
            store.drain()
            kept = map_pieces([(store.location(extent.file), extent.offset, extent.nbytes) for extent in extents])
            expected = torch.cat([b[: e.nbytes] for b, e in zip(data, extents, strict=True)])
            assert torch.equal(kept, expected), round_
    finally:
        store.close()
        backend.close()
