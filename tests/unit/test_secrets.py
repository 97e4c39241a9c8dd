"""The one secret: cached, read again when a key is refused, and not too often."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from botocore.exceptions import ClientError

from backburner.adapters.secrets import REFRESH_SECONDS_MIN, ProviderSecret
from backburner.errors import PortUnavailable


@dataclass
class Vault:
    """Secrets Manager with one secret, and a watch to turn."""

    text: str = '{"openai_api_key":"one"}'
    seconds: float = 1_000.0
    reads: list[str] = field(default_factory=list)
    fails: bool = False

    def get_secret_value(self, *, SecretId: str) -> dict[str, Any]:  # noqa: N803  AWS's spelling
        self.reads.append(SecretId)
        time.sleep(0.001)
        if self.fails:
            raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": self.text}}, "GetSecretValue")
        return {"SecretString": self.text}

    def holds(self, key: str) -> None:
        self.text = json.dumps({"openai_api_key": key})


@pytest.fixture
def vault() -> Vault:
    """A fresh one."""
    return Vault()


@pytest.fixture
def secret(vault: Vault) -> ProviderSecret:
    """The adapter over it."""
    return ProviderSecret(vault, "arn:x", monotonic=lambda: vault.seconds)


def test_the_secret_is_read_once(vault: Vault, secret: ProviderSecret) -> None:
    """However many keys are asked for."""
    assert [secret.get("openai_api_key") for _ in range(3)] == ["one"] * 3
    assert secret.get("anthropic_api_key") == ""
    assert vault.reads == ["arn:x"]


@pytest.mark.parametrize("key", [" one", "one\n", "\tone \r\n", "one\u3000"])
def test_white_space_around_a_key_is_not_part_of_it(vault: Vault, secret: ProviderSecret, key: str) -> None:
    """Pasted from a terminal, it would make every call fail."""
    vault.holds(key)
    assert secret.get("openai_api_key") == "one"


def test_a_refused_key_is_looked_up_again(vault: Vault, secret: ProviderSecret) -> None:
    """True if there is another one now."""
    secret.get("openai_api_key")
    vault.seconds += REFRESH_SECONDS_MIN
    assert not secret.refresh("openai_api_key", "one")
    vault.holds("two")
    vault.seconds += REFRESH_SECONDS_MIN
    assert secret.refresh("openai_api_key", "one")
    assert secret.get("openai_api_key") == "two"
    assert len(vault.reads) == 3


def test_a_key_that_was_changed_soon_after_the_start_is_found(vault: Vault, secret: ProviderSecret) -> None:
    """The first refusal is worth a look, however fresh the secret: without one the job fails for good."""
    secret.get("openai_api_key")
    vault.holds("two")
    vault.seconds += 1
    assert secret.refresh("openai_api_key", "one")


def test_refusals_do_not_hammer(vault: Vault, secret: ProviderSecret) -> None:
    """A wrong key and a thousand jobs: one look in half a minute."""
    secret.get("openai_api_key")
    vault.seconds += REFRESH_SECONDS_MIN
    for _ in range(1_000):
        assert not secret.refresh("openai_api_key", "one")
        vault.seconds += 0.01
    assert len(vault.reads) == 2


def test_one_look_serves_all_who_were_refused(vault: Vault, secret: ProviderSecret) -> None:
    """Ten threads of a batch hold the old key; each learns of the new one."""
    secret.get("openai_api_key")
    vault.holds("two")
    vault.seconds += REFRESH_SECONDS_MIN
    with ThreadPoolExecutor(10) as pool:
        assert all(pool.map(lambda _: secret.refresh("openai_api_key", "one"), range(10)))
    assert len(vault.reads) == 2


def test_threads_that_start_together_read_once(vault: Vault, secret: ProviderSecret) -> None:
    """A cold worker's first batch."""
    barrier = threading.Barrier(10)

    def get(_: int) -> str:
        barrier.wait()
        return secret.get("openai_api_key")

    with ThreadPoolExecutor(10) as pool:
        assert set(pool.map(get, range(10))) == {"one"}
    assert len(vault.reads) == 1


def test_a_secret_that_cannot_be_read_is_an_unavailable_port_that_says_nothing_of_it(
    vault: Vault, secret: ProviderSecret
) -> None:
    """And is tried again by the next who asks."""
    vault.fails = True
    with pytest.raises(PortUnavailable) as raised:
        secret.get("openai_api_key")
    assert raised.value.message == "AccessDeniedException"
    vault.fails = False
    assert secret.get("openai_api_key") == "one"


def test_a_failed_look_keeps_the_keys_there_are(vault: Vault, secret: ProviderSecret) -> None:
    """An outage of Secrets Manager must not take the working provider along."""
    vault.text = '{"openai_api_key":"one","anthropic_api_key":"good"}'
    secret.get("openai_api_key")
    vault.fails = True
    vault.seconds += REFRESH_SECONDS_MIN
    with pytest.raises(PortUnavailable):
        secret.refresh("openai_api_key", "one")
    assert secret.get("anthropic_api_key") == "good"


@pytest.mark.parametrize(
    "text", ["", "sk-pasted", "[]", "null", '"sk-pasted"', "{}", '{"openai_api_key":null}', '{"openai_api_key":7}']
)
def test_a_secret_of_another_shape_holds_no_keys(vault: Vault, secret: ProviderSecret, text: str) -> None:
    """The deployment's slip, which the provider then names as a missing key; no error of ours, and no key shown."""
    vault.text = text
    assert secret.get("openai_api_key") == ""
