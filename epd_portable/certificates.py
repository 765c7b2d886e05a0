"""TLS certificates that are renewed while a server runs.

vLLM's ``--enable-ssl-refresh`` (0.7 and later) follows files that are written in place. It misses
every renewal but the first where files are replaced, as certbot and Kubernetes do.
"""

from __future__ import annotations

import logging
import ssl
from typing import Any

from epd_portable.config.folders import file_stamp

logger = logging.getLogger(__name__)


class Certificate:
    """The certificate of a server, loaded again for the next connection once its files change.

    Args:
        context: Has loaded the certificate; connections that are open keep the former one.
        cert_file: Certificate chain (PEM).
        key_file: Its private key (PEM).
    """

    def __init__(self, context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
        self._context = context
        self._files = (cert_file, key_file)
        self._seen = self._stamps()

    def renew(self) -> None:
        """Load the files if they have changed; a pair that cannot be used is left alone.

        A certificate without its key is such a pair: the other file is about to change, too.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*self._files)
            self._context.load_cert_chain(*self._files)
        except (ssl.SSLError, OSError) as error:
            files = " with ".join(self._files)
            logger.warning("certificate %s: %s; the former one stays in use", files, error)
        else:
            logger.info("certificate %s was renewed", self._files[0])

    def _stamps(self) -> list[tuple[int, int, int]]:
        return [file_stamp(path) for path in self._files]


class RenewedContext(ssl.SSLContext):
    """A server's TLS context with a certificate that may be renewed."""

    certificate: Certificate

    @classmethod
    def load(cls, cert_file: str, key_file: str) -> RenewedContext:
        """Return a context with a certificate.

        Raises:
            ssl.SSLError: It cannot be used.
            OSError: It cannot be read.
        """
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert_file, key_file)
        context.certificate = Certificate(context, cert_file, key_file)
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See ``ssl``; called for each connection."""
        self.certificate.renew()
        return super().wrap_bio(*args, **kwargs)
