"""Detached Ed25519 signatures of files; needs the extra `sign`.

The signature is over the bytes of the file as stored, and is 64 raw bytes beside it, so that any
tool can check it:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem
    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in record.json -sigfile record.json.sig

Source: RFC 8032.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import files

MAKE_KEY = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"
MAKE_PUBLIC = "make it with: openssl pkey -in key.pem -pubout -out public.pem"


def sign(data: bytes, key: Path) -> bytes:
    """Return the signature of `data` by the private key in a PEM file. Raises UsageError."""
    from_pem, _, private, _ = _cryptography()
    found = _load(lambda raw: from_pem(raw, password=None), key, MAKE_KEY)
    if not isinstance(found, private):
        raise UsageError(f"{key} is not an Ed25519 private key", hint=MAKE_KEY)
    return bytes(found.sign(data))


def is_signed(data: bytes, signature: bytes, key: Path) -> bool:
    """Return whether a signature is that of the public key in a PEM file. Raises UsageError."""
    _, public_pem, _, public = _cryptography()
    from cryptography.exceptions import InvalidSignature

    found = _load(public_pem, key, MAKE_PUBLIC)
    if not isinstance(found, public):
        raise UsageError(f"{key} is not an Ed25519 public key", hint=MAKE_PUBLIC)
    try:
        found.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import (
            load_pem_private_key,
            load_pem_public_key,
        )
    except ImportError:
        raise UsageError(
            "signatures need the package cryptography, which is not installed",
            hint="pip install 'supervise-train[sign]'",
        ) from None
    return (
        load_pem_private_key,
        load_pem_public_key,
        ed25519.Ed25519PrivateKey,
        ed25519.Ed25519PublicKey,
    )


def _load(load: Any, path: Path, hint: str) -> Any:
    try:
        with os.fdopen(files.open_file(path, foreign=True), "rb") as file:
            return load(file.read(1 << 16))
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}", hint=hint) from error
    except (ValueError, TypeError) as error:  # no PEM, encrypted, or of an unknown kind
        raise UsageError(f"{path} holds no usable key: {error}", hint=hint) from error
