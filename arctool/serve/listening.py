"""The place where connections come in, and how many of them a process has room for."""

from __future__ import annotations

import errno
import resource
import socket

from arctool.errors import UsageError

OTHER_FILES = 64
"""Of a process: the model's, logs, libraries', and those of connections that are taken before anybody counts them."""
ACCEPTS = 8
"""Connections that are taken in one turn of the event loop."""
WAITING_OUTSIDE = 2048
"""Connections that the kernel holds for us."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections, before anything slow is done. Raises UsageError where the place is taken or not ours to take."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host: {host}: {getattr(error, 'strerror', None) or 'is no name of a host'}") from error
    door = socket.socket(family, kind, protocol)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(address)
        door.listen(WAITING_OUTSIDE)
    except OSError as error:
        door.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"--port: {port} on {host} is in use by another program; choose another, or 0 for any that is free") from error
        raise UsageError(f"--port: cannot listen on {host} port {port}: {error.strerror or error}") from error
    door.setblocking(False)
    return door


def most_connections() -> int:
    """As many as there are files for, less those that everything else needs: a process without any cannot even take a connection to refuse
    it, and asyncio then tries again and again, with a traceback each time."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if files == resource.RLIM_INFINITY else max(16, files - OTHER_FILES)
