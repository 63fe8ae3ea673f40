"""Where sandboxes off this host reach the proxy, said by environment variables (docs/remote-sandboxes.md)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

IP = "OPFORGE_VLLM_PROXY_PUBLIC_IP"
PORT = "OPFORGE_VLLM_PROXY_PUBLIC_PORT"
SCHEME = "OPFORGE_VLLM_PROXY_PUBLIC_SCHEME"
BIND = "OPFORGE_VLLM_PROXY_BIND"
CERT = "OPFORGE_VLLM_PROXY_TLS_CERT"
KEY = "OPFORGE_VLLM_PROXY_TLS_KEY"

_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*\.?")


class PublicError(ValueError):
    """A variable that is missing or no value for what it names; one sentence."""


@dataclass(frozen=True)
class Public:
    """The proxy's address, outside and on this host.

    Attributes:
        url: scheme, address and port at which a sandbox reaches it, without a slash at its end.
        host, port: what it listens on. Loopback unless asked otherwise: what is public is then a tunnel's end or a
            reverse proxy.
        tls: certificate chain and key (None: both in one file) where the proxy itself speaks TLS.
    """

    url: str
    host: str
    port: int
    tls: tuple[Path, Path | None] | None = None


def from_environment(env: Mapping[str, str], tls: bool = False) -> Public | None:
    """The address that the variables give; None where none of them is set.

    Args:
        tls: the proxy speaks TLS by other settings.

    Raises:
        PublicError: a variable is missing beside another, or wrong.
    """
    given = {name: env.get(name, "").strip() for name in (IP, PORT, SCHEME, BIND, CERT, KEY)}
    if not any(given.values()):
        return None
    for name in (IP, PORT):
        if not given[name]:
            others = ", ".join(n for n, v in given.items() if v)
            raise PublicError(f"{name} is not set, but {others} is; sandboxes off this host need {IP} and {PORT}")
    if given[KEY] and not given[CERT]:
        raise PublicError(f"{KEY} is set without {CERT}; name the certificate too")
    scheme = given[SCHEME] or ("https" if given[CERT] or tls else "http")
    if scheme not in ("http", "https"):
        raise PublicError(f"{SCHEME} is {scheme!r}; it must be http or https")
    address, port = _address(IP, given[IP]), _port(PORT, given[PORT])
    host, colon, own = given[BIND].rpartition(":")
    if given[BIND] and not (colon and host):
        raise PublicError(f"{BIND} is {given[BIND]!r}; it must be HOST:PORT, such as 127.0.0.1:{port}")
    files = (Path(given[CERT]), Path(given[KEY]) if given[KEY] else None) if given[CERT] else None
    return Public(
        url=f"{scheme}://{address}:{port}",
        host=_address(BIND, host).strip("[]") if host else "127.0.0.1",
        port=_port(BIND, own) if own else port,
        tls=files,
    )


def candidates(env: Mapping[str, str]) -> list[Public]:
    """The addresses that the variables give: one, or one a port where PORT is a range A-B; none where none is set.

    Several proxies on one host need a port each: BIND, where it is set, then names as many ports (HOST:C-D).

    Raises:
        PublicError: a variable is missing beside another, or wrong.
    """
    ports = _range(PORT, env.get(PORT, "").strip())
    host, colon, own = env.get(BIND, "").strip().rpartition(":")
    binds = _range(BIND, own) if colon else [own]
    if len(ports) == 1 and len(binds) == 1:
        one = from_environment(env)
        return [] if one is None else [one]
    if colon and len(binds) != len(ports):
        raise PublicError(f"{PORT} names {len(ports)} ports and {BIND} {len(binds)}; they must be as many")
    found = []
    for i, port in enumerate(ports):
        bind = {BIND: f"{host}:{binds[i]}"} if colon else {}
        one = from_environment({**env, PORT: port, **bind})
        assert one is not None
        found.append(one)
    return found


def _range(name: str, value: str) -> list[str]:
    """The ports of A-B; what is no range as it stands."""
    first, dash, last = value.partition("-")
    if not dash:
        return [value]
    begin, end = _port(name, first), _port(name, last)
    if end < begin:
        raise PublicError(f"{name} is {value!r}; the first port of a range must not be above its last")
    return [str(port) for port in range(begin, end + 1)]


def _address(name: str, value: str) -> str:
    """An IP address or a host's name as a URL writes it."""
    try:
        ip = ipaddress.ip_address(value.strip("[]"))
    except ValueError:
        if _NAME.fullmatch(value):
            return value
        raise PublicError(
            f"{name} is {value!r}; an IP address or a host's name is expected, without a scheme"
        ) from None
    return f"[{ip}]" if ip.version == 6 else str(ip)


def _port(name: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal() or not 0 < int(value) < 65536:
        raise PublicError(f"{name} is {value!r}; a port is a number from 1 to 65535")
    return int(value)
