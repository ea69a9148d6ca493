"""TLS towards clients and towards replicas."""

from __future__ import annotations

import os
import ssl
from typing import Any

from router.errors import SettingsError
from router.settings import RouterSettings


class Renewable(ssl.SSLContext):
    """Stands for another context, which may be replaced: connections that begin from then on have the new
    one. Servers and clients of asyncio and uvloop ask a context for nothing but ``wrap_bio``.
    """

    current: ssl.SSLContext

    def __new__(cls, current: ssl.SSLContext) -> Renewable:
        made = super().__new__(cls, current.protocol)
        made.current = current
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*args, **kwargs)


def listen_context(settings: RouterSettings) -> ssl.SSLContext | None:
    """For the clients' address; None for plain HTTP. Raises SettingsError."""
    return server_context(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def upstream_context(settings: RouterSettings) -> ssl.SSLContext:
    """For all that is asked of replicas. Raises SettingsError."""
    return client_context(settings.upstream_ca, settings.upstream_cert, settings.upstream_key)


def server_context(cert: str | None, key: str | None, client_ca: str | None) -> ssl.SSLContext | None:
    """For listening; None without a certificate. ``client_ca``: clients must show a certificate of it.

    Raises SettingsError.
    """
    if cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load_chain(context, "--tls-cert", cert, key)
    if client_ca is not None:
        _load_ca(context, "--tls-client-ca", client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # From Python 3.13 on an authority has to say what its key is for, which those that ``openssl req
        # -x509`` makes do not.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def client_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """For replicas with an https URL. Without ``ca`` the system's authorities count. Raises SettingsError."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if ca is not None:
        # Only this one: the system's would let anybody's certificate in.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_ca(context, "--upstream-ca", ca)
    if cert is not None:
        _load_chain(context, "--upstream-cert", cert, key)
    return context


def _load_chain(context: ssl.SSLContext, what: str, cert: str, key: str | None) -> None:
    for path in (cert, key):
        # OpenSSL does not say which of the two it could not read.
        if path is not None and not os.access(path, os.R_OK):
            raise SettingsError(f"{what} {cert}: cannot read {path}; give a PEM file that this user may read")
    try:
        # Without a password OpenSSL would ask for one on the terminal, and a service wait for ever.
        context.load_cert_chain(cert, key, password=b"")
    except (OSError, ssl.SSLError) as error:
        problem = f"no certificate chain in PEM that the key in {key or cert}, without a password, fits"
        raise SettingsError(f"{what} {cert}: {problem} ({error})") from error


def _load_ca(context: ssl.SSLContext, what: str, ca: str) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"{what} {ca}: no certificates can be read: {error}") from error
