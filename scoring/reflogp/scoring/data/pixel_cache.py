"""Cache the pixel digests of encoded images between runs, so that later runs need not decode an image to compute its digest.

The digests are stored in a SQLite file in the user's cache folder. If the file cannot be used, every run decodes the images
again.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import threading
from contextlib import suppress
from types import TracebackType

import PIL

from reflogp.store.digests import cache_dir
from reflogp.store.files import own_folder
from reflogp.store.images import DIGEST_BYTES, Kind

logger = logging.getLogger(__name__)

#: Maximum number of seconds to wait while another process writes to the file.
_PATIENCE = 5.0
#: Maximum number of rows in the file; a row takes about 100 bytes. If there are more rows, the older half is deleted.
_MOST = 4_000_000


class PixelCache:
    """A thread-safe cache of the pixel digests, sizes and modes of encoded images. Use it as a context manager.

    The folder of the cache file must belong to the current user and must not be writable by other users. Otherwise, the file is
    not used, because other users could store false digests in it. Rows with images would then get wrong keys.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None
        self._new: dict[bytes, tuple[bytes, Kind]] = {}

    def __enter__(self) -> PixelCache:
        try:
            folder = own_folder(cache_dir(), "pixels")
            self._file = sqlite3.connect(folder / "pixels.sqlite", timeout=_PATIENCE, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = OFF")
            with self._file:
                self._file.execute(
                    "CREATE TABLE IF NOT EXISTS images (file BLOB PRIMARY KEY, digest BLOB, width INT, height INT, mode TEXT)"
                )
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.write()
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def key(data: bytes) -> bytes:
        """Return the key of an encoded image.

        The key depends on the version of Pillow, because a different version may decode the image to different pixels.
        """
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=PIL.__version__.encode()[:64]).digest()

    def get(self, key: bytes) -> tuple[bytes, Kind] | None:
        """Return (pixel digest, ((width, height), mode)) of the image with this key, or None if it is not in the cache."""
        with self._lock:
            if key in self._new:
                return self._new[key]
            try:
                found = (
                    self._file
                    and self._file.execute("SELECT digest, width, height, mode FROM images WHERE file = ?", (key,)).fetchone()
                )
            except sqlite3.Error as error:
                self._give_up(error)
                found = None
        if not found or not isinstance(found[0], bytes) or len(found[0]) != DIGEST_BYTES:
            return None
        return found[0], ((int(found[1]), int(found[2])), str(found[3]))

    def put(self, key: bytes, digest: bytes, kind: Kind) -> None:
        """Add the digest, size and mode of an image to the cache, in memory only. `write` saves them to the file."""
        with self._lock:
            self._new[key] = (digest, kind)

    def write(self) -> None:
        """Save the digests that are not in the file yet."""
        with self._lock:
            new, self._new = self._new, {}
            if self._file is None or not new:
                return
            rows = [(key, digest, *size, mode) for key, (digest, (size, mode)) in new.items()]
            try:
                with self._file:
                    self._file.executemany("INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?)", rows)
                    [(last,)] = self._file.execute("SELECT COALESCE(MAX(rowid), 0) FROM images")
                    [(count,)] = self._file.execute("SELECT COUNT(*) FROM images") if last > _MOST else [(0,)]
                    if count > _MOST:
                        self._file.execute(
                            "DELETE FROM images WHERE rowid <= (SELECT rowid FROM images ORDER BY rowid LIMIT 1 OFFSET ?)",
                            (count // 2,),
                        )
            except sqlite3.Error as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("image digests cannot be cached (%s), so every run decodes the images again", error)
        if self._file is not None:
            with suppress(sqlite3.Error):
                self._file.close()
        self._file = None
