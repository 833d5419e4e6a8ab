"""Whose daemon an agent obeys.

The environment of a program says where the daemon is, never who it may be: that is the kernel's word (SO_PEERCRED)
against the administrator's, which is the owner of one directory at a fixed path. Only root can make a directory in
``/run`` and give it to a user, and a container that gets the directory gets its owner with it.
"""

from __future__ import annotations

import os
import stat

from gpumond.protocol.messages import SERVICE_SOCKET

SERVICE_DIRECTORY = os.path.dirname(SERVICE_SOCKET)
OVERFLOW_UID = 65534
"""Stands for every user that a user namespace does not know."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_uids(directory: str = SERVICE_DIRECTORY) -> frozenset[int]:
    """Root's, the program's own, and that of the user to whom root has given the service's directory."""
    trusted = {0, os.geteuid()}
    try:
        trusted.add(service_uid(directory))
    except OSError:
        pass
    return frozenset(trusted)


def service_uid(directory: str = SERVICE_DIRECTORY) -> int:
    """Who owns the service's directory, if root alone can have said so. Raises OSError: why it counts for nothing."""
    path = directory
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        above = os.lstat(path)
        if not stat.S_ISDIR(above.st_mode) or above.st_uid != 0 or above.st_mode & OTHERS_WRITE:
            raise PermissionError(f"{path} is not a directory that root alone can change")
    own = os.lstat(directory)
    if not stat.S_ISDIR(own.st_mode) or own.st_mode & OTHERS_WRITE:
        raise PermissionError(f"{directory} is not a directory that its owner alone can change")
    if own.st_uid == OVERFLOW_UID:
        raise PermissionError(f"{directory} belongs to nobody whom this user namespace knows")
    return own.st_uid
