"""A read-only file that knows where it stands; how bytes are had is the heir's concern."""

import io


class PositionedReader(io.RawIOBase):
    """Seeks without reading. An heir gives `_size` and `read`, which moves `_position`."""

    _size: int
    _position: int = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Byte that is read next."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move this position only."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position
