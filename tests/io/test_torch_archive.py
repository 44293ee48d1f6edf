# SPDX-License-Identifier: Apache-2.0
"""Files in torch.save's format, written piece by piece: all readers of the format accept them."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.errors import SpaceError, StorageError, TenCacheError
from tencache_ds.io import torch_archive
from tencache_ds.io.torch_archive import DeferredTensor, begin_archive

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8)


def write_archive(obj, path, fill):
    file = begin_archive(obj, path)
    try:
        fill(file)
        file.finish()
    except BaseException:
        file.discard()
        raise


def nothing(file):
    pass


def value(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_pieces(values, step):
    """Fills deferred tensors in turns of ``step`` elements, as chunks that hold a piece of each kind come."""

    def fill(file):
        for start in range(0, max(v.numel() for v in values.values()), step):
            for tensor, v in values.items():
                file.write(tensor, v[start : start + step])

    return fill


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 5000),
    st.sampled_from([0, 4000, 2**20]),
)
@settings(max_examples=30, deadline=None)
def test_what_torch_loads_is_what_was_written(tmp_path_factory, tensors, step, beside_nbytes):
    """With checksums that are computed beside the writes, or at once, or both."""
    path = tmp_path_factory.mktemp("archive") / "states.pt"
    values = {
        DeferredTensor(index, dtype, numel, grad and dtype.itemsize > 1): value(numel, dtype, index)
        for index, (numel, dtype, grad) in enumerate(tensors)
    }
    with mock.patch.object(torch_archive, "_LEAST_BESIDE_NBYTES", beside_nbytes):
        write_archive({"flat": list(values)}, str(path), in_pieces(values, step))
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None, "a checksum"
    for options in ({"weights_only": True}, {"weights_only": False, "mmap": True}):
        loaded = torch.load(path, **options)["flat"]
        for tensor, result in zip(values, loaded, strict=True):
            assert result.dtype is tensor.dtype
            assert result.requires_grad is tensor.requires_grad
            assert torch.equal(result.detach().view(torch.uint8), values[tensor].view(torch.uint8))
            assert result.data_ptr() % result.element_size() == 0
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_an_object_without_deferred_tensors_is_saved_as_torch_saves_it(tmp_path):
    whole = torch.arange(12.0)
    obj = OrderedDict(
        nested=[{"a": whole, "view": whole[3:7], "shape": torch.Size([3, 4])}, ("text", 1, None)],
        parameter=torch.nn.Parameter(torch.ones(2, 3).t()),
        scalar=torch.tensor(2.5, dtype=torch.float64),
        empty=torch.empty(0, dtype=torch.int64),
        complex=torch.ones(3, dtype=torch.complex64).conj(),
        eight_bits=torch.ones(5).to(torch.float8_e4m3fn),
        storage=torch.ones(3).untyped_storage(),
    )
    ours, stock = tmp_path / "ours.pt", tmp_path / "stock.pt"
    write_archive(obj, str(ours), nothing)
    torch.save(obj, stock)
    records = {}
    for path in (ours, stock):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if "/data" in name or name.endswith("byteorder")]
            records[path] = {name.split("/", 1)[1]: archive.read(name) for name in names}
    records[stock] = {name: data for name, data in records[stock].items() if name in records[ours]}
    assert records[ours] == records[stock]
    for options in ({}, {"mmap": True}):
        result = torch.load(ours, weights_only=False, **options)
        assert result["nested"][0]["view"].untyped_storage()._cdata == result["nested"][0]["a"].untyped_storage()._cdata
        assert torch.equal(result["parameter"], obj["parameter"])
        assert result["parameter"].stride() == (1, 3)
        assert torch.equal(result["complex"], obj["complex"])


def test_tensors_without_elements_share_one_storage_and_nothing_else(tmp_path):
    marked, row = torch.empty(0), torch.ones(4)
    marked.owner = "someone"
    dtypes = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex64, torch.bool)
    values = [
        *(torch.empty(shape, dtype=dtype) for dtype in dtypes for shape in ((0,), (0,), (3, 0), (0, 2))),
        torch.empty(0, requires_grad=True),
        torch.nn.Parameter(torch.empty(0)),
        torch.empty(0, 3).to_sparse(),
        torch.empty(0, device="meta"),
        marked,
        row,
        row[:0],
    ]
    ours, stock = tmp_path / "ours.pt", tmp_path / "stock.pt"
    write_archive(values, str(ours), nothing)
    torch.save(values, stock)
    loaded, expected = (torch.load(path, weights_only=False) for path in (ours, stock))
    for mine, theirs in zip(loaded, expected, strict=True):
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "__class__", "__dict__"):
            assert getattr(mine, name) == getattr(theirs, name)
        assert mine.is_sparse or mine.stride() == theirs.stride()
    assert loaded[-1].untyped_storage()._cdata == loaded[-2].untyped_storage()._cdata
    assert len({id(tensor) for tensor in loaded}) == len(values)
    with zipfile.ZipFile(ours) as archive:
        n_ours = len(archive.namelist())
    with zipfile.ZipFile(stock) as archive:
        assert n_ours < len(archive.namelist())


def test_storages_are_aligned_as_by_torch(tmp_path):
    path = tmp_path / "states.pt"
    write_archive([torch.ones(3), torch.ones(1001, dtype=torch.uint8), torch.ones(5)], str(path), nothing)
    reader = torch._C.PyTorchFileReader(str(path))
    offsets = [reader.get_record_offset(name) for name in reader.get_all_records()]
    assert len(offsets) == 6
    assert all(offset % 64 == 0 for offset in offsets)


def test_lengths_and_offsets_beyond_4_gib(tmp_path):
    """A sparse file: what lies between the ends is never written."""
    numel = 2**30 + 7
    path = tmp_path / "states.pt"
    first, last = DeferredTensor("first", torch.float32, numel), DeferredTensor("last", torch.float32, 5)

    def fill(file):
        record = file._deferred[first]
        record.n_written = record.nbytes - 8
        file.write(first, torch.tensor([1.0, 2.0]))
        file.write(last, torch.arange(5.0))

    write_archive([first, last], str(path), fill)
    result = torch.load(path, mmap=True)
    assert result[0].shape == (numel,)
    assert result[0][-3:].tolist() == [0.0, 1.0, 2.0]
    assert result[1].tolist() == [0, 1, 2, 3, 4]
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        assert sizes["states/data/0"] == 4 * numel
        assert archive.read("states/data/1") == struct.pack("<5f", *range(5))


def test_a_name_with_other_letters(tmp_path):
    path = tmp_path / "gewichte-\u00e4\u00f6.pt"
    write_archive({"a": torch.ones(3)}, str(path), nothing)
    assert torch.load(path)["a"].tolist() == [1, 1, 1]


# What goes wrong


def remaining(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_an_error_while_filling_leaves_no_file(tmp_path):
    tensor = DeferredTensor("state", torch.float32, 100)

    def fill(file):
        file.write(tensor, torch.ones(50))
        raise StorageError("read", "scratch", 0, 4096, "Input/output error", errno=5)

    with pytest.raises(StorageError, match="Input/output error"):
        write_archive([tensor], str(tmp_path / "states.pt"), fill)
    assert remaining(tmp_path) == []


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda file, tensor: file.write(tensor, torch.ones(99)), "396 of 400 bytes were written"),
        (lambda file, tensor: file.write(tensor, torch.ones(101)), "has 400 bytes; more were written"),
        (lambda file, tensor: file.write(tensor, torch.ones(100).double()), "is torch.float32 in the checkpoint"),
    ],
)
def test_a_tensor_has_to_be_filled_exactly(tmp_path, fill, message):
    tensor = DeferredTensor("state", torch.float32, 100)
    with pytest.raises(TenCacheError, match=message):
        write_archive([tensor], str(tmp_path / "states.pt"), lambda file: fill(file, tensor))
    assert remaining(tmp_path) == []


def test_until_its_end_it_is_no_archive(tmp_path):
    tensor = DeferredTensor("state", torch.float32, 100)
    path = tmp_path / "states.pt"

    def fill(file):
        file.write(tensor, torch.ones(100))
        assert not zipfile.is_zipfile(path)
        with pytest.raises((RuntimeError, pickle.UnpicklingError, EOFError)):
            torch.load(path)

    write_archive([tensor], str(path), fill)
    assert torch.load(path)[0].tolist() == [1.0] * 100


def test_a_full_device_is_a_space_error(monkeypatch, tmp_path):
    def pwrite(descriptor, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch_archive.os, "pwrite", pwrite)
    with pytest.raises(SpaceError, match=r"write of a checkpoint failed at .*states\.pt.*No space left on device"):
        write_archive([torch.ones(3)], str(tmp_path / "states.pt"), nothing)
    assert remaining(tmp_path) == []


def test_short_writes_are_continued(monkeypatch, tmp_path):
    pwrite = torch_archive.os.pwrite
    monkeypatch.setattr(
        torch_archive.os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:7], offset)
    )
    write_archive([torch.arange(100.0)], str(tmp_path / "states.pt"), nothing)
    assert torch.equal(torch.load(tmp_path / "states.pt")[0], torch.arange(100.0))


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(StorageError, match="create of a checkpoint failed at .*No such file or directory"):
        write_archive({}, str(tmp_path / "none" / "states.pt"), nothing)


def test_nobody_else_saves_a_deferred_tensor(tmp_path):
    with pytest.raises(TenCacheError, match="the tensor state of a checkpoint is not in memory"):
        torch.save([DeferredTensor("state", torch.float32, 100)], tmp_path / "states.pt")


def test_memory_under_two_dtypes_is_refused_as_by_torch(tmp_path):
    whole = torch.ones(4)
    with pytest.raises(TenCacheError, match="FloatStorage and BFloat16Storage"):
        write_archive([whole, whole.view(torch.bfloat16)], str(tmp_path / "states.pt"), nothing)
