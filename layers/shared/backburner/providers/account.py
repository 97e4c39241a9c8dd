"""A deployment's account with a provider: its key, and what to do when the key is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backburner.errors import Authentication, PortUnavailable


@dataclass(frozen=True)
class Account:
    """`key` gives the API key; `refresh(refused)` reads it anew and says whether it is another one now."""

    name: str
    key: Callable[[], str]
    refresh: Callable[[str], bool]

    def use[T](self, call: Callable[[str], T]) -> T:
        """Call with the key; once more if it was refused and has since been changed. Raises Authentication."""
        key = self._usable()
        try:
            return call(key)
        except Authentication:
            if not self._has_changed(key):
                raise
            return call(self._usable())

    def _has_changed(self, key: str) -> bool:
        try:
            return self.refresh(key)
        except PortUnavailable:  # the refusal stands
            return False

    def _usable(self) -> str:
        """The key. An SDK takes one with a space or an umlaut in it for a broken connection, so it is refused here."""
        key = self.key()
        if not key:
            raise Authentication(f"There is no {self.name} key: put {self.name}_api_key into the deployment's secret.")
        if not all("!" <= character <= "~" for character in key):
            raise Authentication(f"The {self.name} key in the deployment's secret holds characters that no key has.")
        return key
