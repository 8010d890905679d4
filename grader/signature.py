"""Ed25519 signatures over a record's canonical JSON, so that an edited or foreign record is recognised.

Made with the `cryptography` library. The canonical form is the record without its signature, as JSON with sorted keys,
no spaces, and UTF-8.
"""

import base64
import json
import os
from enum import StrEnum
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from grader.errors import InfrastructureError, UsageError
from grader.record import Record


class Verdict(StrEnum):
    """What a signature says."""

    GENUINE = "genuine"
    UNSIGNED = "unsigned"
    FORGED = "forged"  # signed by another key, or edited after it was signed


def canonical(record: Record) -> bytes:
    """Return the bytes that are signed."""
    content = record.model_dump(mode="json")
    content.pop("signature")
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def make_key(path: Path) -> None:
    """Write a new private key in PEM form, readable by its owner alone.

    Raises:
        UsageError: Something is there already; a key is never overwritten.
    """
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already", "move it away first, or name another place") from error
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(pem)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        InfrastructureError: The file is missing or holds no Ed25519 private key.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InfrastructureError(f"{path} holds no readable private key: {error}", "make one: grader keys") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InfrastructureError(f"{path} holds a {type(key).__name__}, expected Ed25519", "make one: grader keys")
    return key


def public_text(key: Ed25519PrivateKey) -> str:
    """Return the public key as base64 text."""
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def sign(record: Record, key: Ed25519PrivateKey) -> Record:
    """Return the record with its signature."""
    return record.model_copy(update={"signature": base64.b64encode(key.sign(canonical(record))).decode()})


def verify(record: Record, public_key: str) -> Verdict:
    """Say whether a record is as it was signed by the owner of `public_key` (base64 of 32 bytes).

    Raises:
        UsageError: `public_key` is no public key.
    """
    if record.signature is None:
        return Verdict.UNSIGNED
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
    except ValueError as error:
        raise UsageError(
            f"{public_key!r} is no public key: {error}", "take the one that `grader keys` shows"
        ) from error
    try:
        key.verify(base64.b64decode(record.signature), canonical(record))
    except (InvalidSignature, ValueError):
        return Verdict.FORGED
    return Verdict.GENUINE
