"""An HTTP proxy on the loopback address that adds Ray's token, for browsers and tools that know no tokens.

Its URL begins with a secret path, so that web pages, which the user's browser shows, do not reach it; a tool that writes URLs
into its output may send the secret as a header instead. On Linux it also serves processes of its own user only, so that another
user gets nothing even with the URL, which may be among a command's arguments.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Protocol

from .peer import is_own

_HEAD_TIMEOUT = 30.0  # Seconds in which a client sends the head of its request.
_LINK_TIMEOUT = 20.0  # Seconds for which a request waits for a lost stream to the cluster.
_TRIES, _PAUSE = 3, 0.2  # Tries of a request to which there came no answer, and seconds between two.
_LONGEST_HEAD = 65536
_REQUEST = re.compile(rb"([A-Z]{1,20}) (/[\x21-\x7e]*) HTTP/1\.[01]")
# Headers that the proxy sets itself, those for proxies, and those that would tell Ray or another service's server a secret:
# cookies of 127.0.0.1 are sent to each of its ports.
_DROPPED = frozenset(
    b"authorization connection cookie host keep-alive proxy-authorization proxy-connection referer x-ray-authorization "
    b"x-rayslurm-secret".split()
)
SECRET_HEADER = "X-Rayslurm-Secret"


class Upstream(Protocol):
    """What the proxy needs of `head.Head`."""

    async def until_ready(self, timeout: float) -> None:
        """Wait until `forward` can be called; TimeoutError if that takes too long."""

    async def forward(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send `first`, then copy both ways; False if there came no answer."""


@dataclass(frozen=True)
class Answer:
    """An answer of the proxy itself."""

    status: str
    text: str
    location: str = ""

    def encode(self) -> bytes:
        """The answer as HTTP."""
        body = (self.text + "\n").encode()
        lines = [f"HTTP/1.1 {self.status}", "Content-Type: text/plain; charset=utf-8", f"Content-Length: {len(body)}"]
        lines += ["Cache-Control: no-store", "Connection: close", *([f"Location: {self.location}"] if self.location else [])]
        return "\r\n".join([*lines, "", ""]).encode() + body


_BAD = Answer("400 Bad Request", "This is no request that the proxy understands.")
_FORBIDDEN = Answer("403 Forbidden", "Use the URL that `rayslurm dashboard` prints, as the user who runs it.")


def rewritten(head: bytes, secret: str, token: str, port: int, strips: bool = True) -> bytes | Answer:
    """The head of a request for the service on the head node's `port`, or the answer to a refused one. Pure.

    Without `strips` the service expects the secret at the beginning of its paths.

    Each request has a connection of its own, as only the head of the first request on a connection is read.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None:
        return _BAD
    method, target = request.groups()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    given = headers.get(SECRET_HEADER.lower().encode())
    if given is not None:
        slash, path = b"/", target[1:]
    else:
        given, slash, path = target[1:].partition(b"/")
    if not hmac.compare_digest(given.partition(b"?")[0], secret.encode()):
        return _FORBIDDEN
    if not slash:
        return Answer("302 Found", "The page is one slash away.", f"/{secret}/")
    if not strips:
        path = target[1:]
    kept, upgrade = [], b""
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not re.fullmatch(rb"[!-9;-~]+", name):  # Continued lines are obsolete (RFC 9112, 5.2).
            return _BAD
        if name.lower() == b"upgrade":
            upgrade = value.strip()
        if name.lower() not in _DROPPED:
            kept.append(line)
    kept.append(b"Host: 127.0.0.1:%d" % port)
    kept.append(b"Connection: " + (b"Upgrade" if upgrade else b"close"))
    if token:
        kept.append(b"Authorization: Bearer " + token.encode())
    return b"\r\n".join([method + b" /" + path + b" HTTP/1.1", *kept, b"", b""])


class Proxy:
    """Serves a port of one cluster's head node on the loopback address of this machine."""

    def __init__(self, upstream: Upstream, token: str, port: int, secret: str | None = None) -> None:
        """With `secret` the service knows it, and expects it at the beginning of its paths."""
        self._upstream, self._token, self._port, self._strips = upstream, token, port, secret is None
        self._secret = secret or secrets.token_urlsafe(24)
        self._server: asyncio.Server | None = None
        self.url = ""  # Set by `start`; without a slash at the end, as tools append paths to it.

    async def start(self, port: int = 0) -> None:
        """Listen on a port, 0 for any that is free; raises OSError if it is taken."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=_LONGEST_HEAD)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/{self._secret}"

    async def close(self) -> None:
        """Listen no more; open connections end with the event loop."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(reader, writer)
            if answer is not None:
                writer.write(answer.encode())
                await writer.drain()
        except OSError:
            pass  # The client has gone.
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer | None:
        """Serve one request; returns the answer if it is the proxy's own."""
        if not is_own(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
            return _FORBIDDEN
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_TIMEOUT)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            return _BAD
        request = rewritten(head, self._secret, self._token, self._port, self._strips)
        if isinstance(request, Answer):
            return request
        for _ in range(_TRIES):  # The stream may break under a request, and comes again.
            try:
                await self._upstream.until_ready(_LINK_TIMEOUT)
            except asyncio.TimeoutError:
                return Answer("504 Gateway Timeout", "The Ray cluster is out of reach now; rayslurm keeps trying.")
            if await self._upstream.forward(request, reader, writer):
                return None
            await asyncio.sleep(_PAUSE)
        return Answer("502 Bad Gateway", "The dashboard gave no answer; it may have ended.")
