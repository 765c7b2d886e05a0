"""Certificates that sign themselves."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

HERE = "DNS:localhost,IP:127.0.0.1"


def make_certificate(folder: Path, name: str = "server", *, names: str = HERE) -> tuple[Path, Path]:
    """Make files of a certificate, good for a day, and of its key.

    Args:
        folder: Where.
        name: Of the files, and of whom it is.
        names: Its alternative names, as openssl writes them.
    """
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    made = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    named = ("-days", "1", "-subj", f"/CN={name}", "-addext", f"subjectAltName={names}")
    command = ["openssl", *made, *named, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def served_certificate(port: int) -> bytes:
    """Return the certificate (DER) that a server on this machine shows to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return found
