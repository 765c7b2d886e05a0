"""A container as Kubernetes runs one: a read-only root, an unknown user without a home, ``/tmp``.

Made of a mount and two user namespaces, so it needs no privilege where the kernel allows these.
Not reproduced: files of the image that belong to another user; those of this user can be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USERS, _NEW_MOUNTS = 0x10000000, 0x00020000
_RECURSIVE, _SLAVE = 0x4000, 0x80000
USER = 12345
UNSET = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "HF_HOME", "TMPDIR")
# A folder under the one that is hidden is held at another place meanwhile.
MOUNTS = """
set -e
place=$1 hidden=$2 seen=$3
shift 3
mount --bind "$seen" /mnt
mount --bind "$hidden" "$place"
mkdir -p "$seen" 2>/dev/null && mount --bind /mnt "$seen"
umount /mnt
while read -r id parent device root point rest; do
    case "$point" in "$place" | "$seen" | /dev | /dev/* | /proc | /proc/*) continue ;; esac
    mount -o remount,bind,ro "$point" 2>/dev/null || true
done < /proc/self/mountinfo
exec "$@"
"""


def enter(folder: Path, *, place: str = "/tmp", seen: Path | None = None, **env: str) -> list[str]:
    """Return the beginning of a command that runs in such a container.

    Args:
        folder: Holds what is written to ``place``.
        place: What can be written, with ``/dev/shm``.
        seen: A further folder that can be written, as a volume; its path is that of outside.
        env: Variables there; of `UNSET` there are no others.
    """
    folder.mkdir(exist_ok=True)
    return [
        *("unshare", "--user", "--map-root-user", "--mount", "--propagation", "slave"),
        *("sh", "-c", MOUNTS, "sh"),
        *(place, str(folder), str(seen or folder)),
        *("unshare", "--user", f"--map-user={USER}", f"--map-group={USER}", "env"),
        *(f"--unset={name}" for name in UNSET),
        *(f"{name}={value}" for name, value in env.items()),
    ]


def join(folder: Path) -> None:
    """Put this process, of one thread, into such a container; its variables stay.

    ``folder`` is a volume there, and holds what is written to ``/tmp``.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    user, group = os.geteuid(), os.getegid()
    _unshare(_NEW_USERS | _NEW_MOUNTS, f"0 {user} 1", f"0 {group} 1")
    _check(_LIBC.mount(b"none", b"/", None, _RECURSIVE | _SLAVE, None))
    mounts = ["sh", "-c", MOUNTS, "sh", "/tmp", str(folder / "tmp"), str(folder), "true"]
    subprocess.run(mounts, check=True)
    _unshare(_NEW_USERS, f"{USER} 0 1", f"{USER} 0 1")


def _unshare(kinds: int, users: str, groups: str) -> None:
    _check(_LIBC.unshare(kinds))
    for file, value in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        Path(f"/proc/self/{file}").write_text(value)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def why_not(folder: Path) -> str:
    """Return why there can be no such container here; empty if there can."""
    with contextlib.suppress(FileNotFoundError):
        tried = subprocess.run([*enter(folder), "true"], capture_output=True, text=True)
        return tried.stderr.strip()
    return "not on PATH: unshare"
