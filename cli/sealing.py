"""The key that seals webhook secrets, and its rotation."""

from __future__ import annotations

import secrets
from typing import Any

from backburner.adapters.dynamodb import ClientsTable
from backburner.adapters.secrets import FernetSeals, sealing_keys


def rotate_key(secrets_manager: Any, arn: str, table: ClientsTable, *, keep: int | None) -> tuple[int, int]:
    """Seal webhook secrets with a fresh key from now on, and the clients' own with it anew.

    keep: how many of the keys before it go on opening what they sealed; None: all. Jobs keep what came with them as it
    was sealed, so a key is needed for as long as jobs accepted under it are kept.
    Returns how many keys there are now, and how many clients have a secret. Raises SealBroken if one of theirs can be
    opened by none of the keys; nothing is dropped then.
    """
    before = sealing_keys(secrets_manager.get_secret_value(SecretId=arn)["SecretString"])
    fresh = secrets.token_urlsafe(48)
    secrets_manager.put_secret_value(SecretId=arn, SecretString=" ".join([fresh, *before]))
    seals = FernetSeals(lambda: secrets_manager, arn)
    clients = table.reseal(lambda token: seals.seal(seals.open(token)))
    kept = before[:keep]
    if kept != before:
        secrets_manager.put_secret_value(SecretId=arn, SecretString=" ".join([fresh, *kept]))
    return 1 + len(kept), clients
