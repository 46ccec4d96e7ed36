# SPDX-License-Identifier: Apache-2.0
"""Checks the address that a server listens on, and removes secrets from everything that is written about it."""

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

LOCAL = "127.0.0.1"
DEVELOPMENT = "VLLM_SERVER_DEV_MODE"
MASK = "***"
# The variable with the API key, as clients of this API name it.
KEY = "OPENAI_API_KEY"
# Words in a name that make its value a secret. `tokens` is a count and `tokenizer` a file, so they are not secret.
SECRET = {"key", "keys", "apikey", "token", "password", "passwd", "passphrase", "secret", "credential", "credentials"}
SECRET |= {"auth", "authorization", "bearer"}
# Shorter values are not removed from other texts: they would match by chance.
SHORTEST = 4
FLAG = re.compile(r"(--?[A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
SETTING = re.compile(r"([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
# Secrets in any text: credentials in an address, an authorization header, and the formats of providers' keys.
FORMS = (
    (re.compile(r"(\w+://)[^/\s@]+@"), rf"\1{MASK}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+(?!\*)[\w.~+/=-]{4,}"), rf"\1 {MASK}"),
    (re.compile(r"(?i)([?&][\w-]*(?:key|token|secret|password)=)[^&\s]+"), rf"\1{MASK}"),
    (re.compile(r"\b(?:hf_|sk-)[\w-]{8,}"), MASK),
)


class ExposureError(ValueError):
    """A server would be reachable from other machines although it must not be."""


def names_secret(name: str) -> bool:
    """Whether the value of a flag, a variable or a JSON key is a secret, by its name."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return not SECRET.isdisjoint(re.split(r"[^a-z0-9]+", words))


def forms_masked(text: str) -> str:
    for form, instead in FORMS:
        text = form.sub(instead, text)
    return text


def mask(words: Sequence[str]) -> list[str]:
    """The words of a command with its secrets masked."""
    shown, hiding = [], False
    for word in words:
        flag = FLAG.fullmatch(word)
        if flag:
            name, value = flag.groups()
            hiding = names_secret(name) and value is None
            shown.append(name if value is None else f"{name}={MASK if names_secret(name) else masked_value(value)}")
        else:
            shown.append(MASK if hiding else masked_value(word))
    return shown


def masked_value(word: str) -> str:
    """Masks the secrets in a word that is not a flag: KEY=VALUE, JSON, an address, or any other text."""
    setting = SETTING.fullmatch(word)
    if setting and names_secret(setting[1]):
        return f"{setting[1]}={MASK}"
    if word.lstrip()[:1] in ("{", "["):
        try:
            return forms_masked(json.dumps(masked_json(json.loads(word))))
        except ValueError:
            pass
    return forms_masked(word)


def masked_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: MASK if names_secret(key) else masked_json(inner) for key, inner in value.items()}
    return [masked_json(inner) for inner in value] if isinstance(value, list) else value


def secrets_of(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """The secrets of a command and of the environment, the longest first, to be removed from logs."""
    found = {value for name, value in environment.items() if names_secret(name) and len(value) >= 2 * SHORTEST}
    for word, shown in zip(words, mask(words), strict=True):
        if shown == MASK:
            found.add(word)
        elif shown.endswith(f"={MASK}"):
            found.add(word.partition("=")[2])
        elif MASK in shown and word.lstrip()[:1] in ("{", "["):
            found |= set(json_secrets(json.loads(word)))
    return sorted((one for one in found if len(one) >= SHORTEST), key=lambda one: (-len(one), one))


def json_secrets(value: Any, secret: bool = False) -> list[str]:
    if isinstance(value, dict):
        return [one for key, inner in value.items() for one in json_secrets(inner, secret or names_secret(key))]
    if isinstance(value, list):
        return [one for inner in value for one in json_secrets(inner, secret)]
    return [str(value)] if secret else []


def scrub(value: Any, secrets: Sequence[str]) -> Any:
    """A record or a text with the secrets masked."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return forms_masked(value)
    if isinstance(value, dict):
        return {key: scrub(inner, secrets) for key, inner in value.items()}
    return [scrub(inner, secrets) for inner in value] if isinstance(value, (list, tuple)) else value


def values_of(flags: Sequence[str], name: str) -> list[str]:
    """The values of a flag, given as `--name VALUE ...` or `--name=VALUE`. As in vLLM, _ means -."""
    found, taking = [], False
    for word in flags:
        flag = FLAG.fullmatch(word)
        if flag:
            taking = flag[1].replace("_", "-") == name
            found += [flag[2]] if taking and flag[2] is not None else []
        elif taking:
            found.append(word)
    return found


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server that listens on the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def development_mode(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether vLLM would start with its development routes."""
    return environment.get(DEVELOPMENT, "0").strip() not in ("", "0")


def refuse_exposed(host: str, environment: Mapping[str, str] = os.environ) -> None:
    """Checks the address that a server is going to listen on.

    Raises:
        ExposureError: other machines could reach a server in development mode.
    """
    if not is_local(host) and development_mode(environment):
        raise ExposureError(
            f"--host {host} with {DEVELOPMENT}={environment[DEVELOPMENT]}: vLLM's development mode lets every client "
            f"run code in the server's workers: use {LOCAL}, or unset {DEVELOPMENT}"
        )
