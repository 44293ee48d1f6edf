# SPDX-License-Identifier: Apache-2.0
"""The NVMe paths of one engine: a folder for scratch files and a backend for each, and the stores on them.

Every path has its own lanes: a slow or hung device does not delay the others.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tencache_ds.errors import SpaceError, StorageError, add_note
from tencache_ds.io.backends.protocol import StorageBackend, StorageCancelledError
from tencache_ds.io.integrity import Fingerprint
from tencache_ds.io.scratch import ScratchFolder
from tencache_ds.io.store import ExtentStore
from tencache_ds.io.stripes import Striping
from tencache_ds.io.wrappers.routed import BandwidthMeter, MeteredBackend
from tencache_ds.observability.paths import Contents, PathStats, what_was_on

FILE_SUFFIX = ".bin"


@dataclass(slots=True, eq=False)
class NvmePath:
    """One folder that the user gave.

    Attributes:
        root: the folder.
        scratch: folder and names of this rank's files.
        backend: serves this path only.
        reason: why this backend was chosen.
        meter: bandwidth of the path; only counts traffic of stores over several paths.
        stores: kind, store, and which of the store's devices this is.
    """

    root: str
    scratch: ScratchFolder
    backend: StorageBackend
    reason: str
    meter: BandwidthMeter = field(default_factory=BandwidthMeter)
    stores: list[tuple[str, ExtentStore, int]] = field(default_factory=list)

    def contents(self) -> list[Contents]:
        """Current contents."""
        return [Contents(kind, *store.held()[index]) for kind, store, index in self.stores]

    def stats(self) -> PathStats:
        """Traffic so far, and current contents."""
        totals = self.backend.counters.snapshot()
        return PathStats(
            path=self.root,
            backend=self.backend.name,
            nbytes_read=totals.bytes_read,
            nbytes_written=totals.bytes_written,
            read_seconds=totals.read_ns / 1e9,
            write_seconds=totals.write_ns / 1e9,
            bytes_per_s=self.meter.bytes_per_s,
            contents=tuple(self.contents()),
        )


class NvmePaths:
    """Opens paths as stores need them, and closes everything. Any thread may call :meth:`explain`; the others are for
    one at a time.

    Args:
        rank: global rank, part of the files' names.
        open_backend: opens a backend and gives the reason for the choice.
        new_placement: creates a placement for a store over this number of paths.
    """

    def __init__(
        self,
        rank: int,
        open_backend: Callable[[], tuple[StorageBackend, str]],
        new_placement: Callable[[int], Striping],
    ) -> None:
        self._rank = rank
        self._open_backend = open_backend
        self._new_placement = new_placement
        self._paths: dict[str, NvmePath] = {}
        self._stores: list[tuple[ExtentStore, list[NvmePath]]] = []
        self._n_opened: collections.Counter[str] = collections.Counter()

    @property
    def paths(self) -> list[NvmePath]:
        """Those that are open, in the order in which they were."""
        return list(self._paths.values())

    @property
    def stores(self) -> list[ExtentStore]:
        """All stores."""
        return [store for store, _ in self._stores]

    def open_store(
        self,
        kind: str,
        roots: Sequence[str],
        *,
        preallocate_nbytes: int,
        growth_nbytes: int,
        n_files: int,
        fingerprint: Fingerprint | None,
        timeout_s: float,
    ) -> ExtentStore:
        """A store over some paths; several paths share its extents in proportion to their bandwidth.

        Args:
            kind: ``"weights"``, ``"optimizer"`` or ``"activations"``, part of the files' names.
            roots: the folders, different ones.
            preallocate_nbytes, growth_nbytes, n_files, fingerprint, timeout_s: see
                :class:`tencache_ds.io.store.ExtentStore`.

        Raises:
            ConfigError: a folder cannot hold scratch files, or no backend works.
            SpaceError: all paths together cannot hold ``preallocate_nbytes``.
            StorageError: a file cannot be created.
        """
        paths = [self._open(root) for root in roots]
        several = len(paths) > 1
        number = self._n_opened[kind]
        self._n_opened[kind] += 1
        name = f"{kind}-{number}" if number else kind  # those who share the weights each have an optimizer
        places = [
            (
                path.scratch.path(f"{name}{FILE_SUFFIX}"),
                MeteredBackend(path.backend, path.meter) if several else path.backend,
            )
            for path in paths
        ]
        store = ExtentStore(
            *places[0],
            others=places[1:],
            placement=self._new_placement(len(paths)) if several else None,
            preallocate_nbytes=preallocate_nbytes,
            growth_nbytes=growth_nbytes,
            n_files=n_files,
            fingerprint=fingerprint,
            timeout_s=timeout_s,
            explain=self.explain,
        )
        self._stores.append((store, paths))
        for index, path in enumerate(paths):
            path.stores.append((kind, store, index))
        return store

    def close_store(self, store: ExtentStore) -> None:
        """Closes a store, and the paths without another store."""
        with contextlib.ExitStack() as stack:
            for path in self.paths:
                path.stores = [entry for entry in path.stores if entry[1] is not store]
                if not path.stores:
                    del self._paths[os.path.abspath(path.root)]
                    stack.callback(path.backend.close)
            self._stores = [entry for entry in self._stores if entry[0] is not store]
            stack.callback(store.close)

    def reweigh(self) -> None:
        """Between two steps: the bandwidths measured in the last step decide the placement of extents in the next."""
        if all(len(paths) == 1 for _, paths in self._stores):
            return
        for path in self._paths.values():
            path.meter.end_interval()
        for store, paths in self._stores:
            store.reweigh([path.meter.bytes_per_s for path in paths])

    def explain(self, error: StorageError) -> None:
        """Adds a note about the contents of a path to its error."""
        if isinstance(error, (StorageCancelledError, SpaceError)) or hasattr(error, "__notes__"):
            return
        for path in self.paths:
            if os.path.dirname(error.path) == path.scratch.folder:
                add_note(error, what_was_on(path.root, path.contents()))

    def close(self) -> None:
        """Closes all stores and backends, even if one of them raises."""
        with contextlib.ExitStack() as stack:
            for path in self._paths.values():
                stack.callback(path.backend.close)
            for store, _ in self._stores:
                stack.callback(store.close)

    def _open(self, root: str) -> NvmePath:
        key = os.path.abspath(root)
        if key not in self._paths:
            scratch = ScratchFolder(root, self._rank, "engine")
            backend, reason = self._open_backend()
            self._paths[key] = NvmePath(root, scratch, backend, reason)
        return self._paths[key]
