"""Messages over a socket between two processes, one of which may write nonsense. Standard library only.
A message is its length, a CRC-32 and its bytes. On a non-blocking socket nothing here waits."""

import socket
import struct
from zlib import crc32

HEADER = struct.Struct("!QI")
PART = 2**18  # bytes that one call sends or receives


class Frames:
    """Messages of up to `longest` bytes."""

    def __init__(self, connection: socket.socket, longest: int):
        self.socket, self.longest = connection, longest
        self.received, self.unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: bytes) -> None:
        """Raises OSError if the other end is closed."""
        self.unsent += HEADER.pack(len(message), crc32(message)) + message
        self.flush()

    def flush(self) -> None:
        while self.unsent:
            try:
                sent = self.socket.send(self.unsent[:PART])
            except BlockingIOError:
                return
            del self.unsent[:sent]

    def receive(self) -> list[bytes]:
        """The messages that one read completes. Raises EOFError, OSError, or ValueError if the bytes are no message."""
        try:
            part = self.socket.recv(PART)
        except BlockingIOError:
            return []
        if not part:
            raise EOFError
        self.received += part
        messages = []
        while len(self.received) >= HEADER.size:
            size, checksum = HEADER.unpack_from(self.received)
            if size > self.longest:
                raise ValueError(f"a message of {size} bytes; the limit is {self.longest}")
            if len(self.received) < HEADER.size + size:
                break
            message = bytes(self.received[HEADER.size : HEADER.size + size])
            del self.received[: HEADER.size + size]
            if crc32(message) != checksum:
                raise ValueError("a message with another checksum")
            messages.append(message)
        return messages

    def close(self) -> None:
        self.socket.close()
