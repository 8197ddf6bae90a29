"""Whether a certificate and its key can be served: found out before the model is loaded, and told by the file that is to blame."""

from __future__ import annotations

import ssl
from pathlib import Path

from arctool.errors import UsageError


def check_tls(certificate: Path, key: Path) -> None:
    """Raise UsageError unless both are PEM files that belong together, the key without a passphrase."""
    for flag, path in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise UsageError(f"{flag}: {path}: cannot be read: {error.strerror or error}") from error

    def locked() -> str:
        # Without this OpenSSL would ask whoever sits at the terminal, and a server that nobody watches would wait for ever.
        raise UsageError(f"--tls-key: {key}: is locked with a passphrase; a server needs one that is not")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, locked)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"--tls-key: {key}: is not the key of {certificate}") from error
        why = f" ({error.reason.lower().replace('_', ' ')})" if error.reason else ""
        raise UsageError(f"--tls-cert, --tls-key: {certificate}, {key}: expected a certificate and its key in PEM{why}") from error
