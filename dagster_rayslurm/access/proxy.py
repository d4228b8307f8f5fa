"""An HTTP proxy on the loopback address that adds Ray's token to requests of browsers and tools that cannot send the token.

The path of the proxy's URL begins with a secret, a random text. Web pages in the user's browser do not know the secret, and so
cannot send requests to the proxy. A tool that prints URLs may send the secret as a header instead. On Linux the proxy serves only
processes of the proxy's own user, because other users can see a URL among the arguments of a command.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from dataclasses import dataclass

from .head import Head, Unanswered
from .peer import is_own

_HEAD_TIMEOUT = 30.0  # Seconds in which a client sends the head of its request.
_LINK_TIMEOUT = 20.0  # Seconds for which a request waits for a lost stream to the cluster.
_TRIES, _PAUSE = 3, 0.2  # Most attempts to send a request that gets no answer, and seconds between two of them.
_LONGEST_HEAD = 65536
_REQUEST = re.compile(rb"([A-Z]{1,20}) (/[\x21-\x7e]*) HTTP/1\.[01]")
# Headers that the proxy sets, headers for proxies, and headers that would tell the server of a service a secret. Browsers send
# cookies of 127.0.0.1 to every port.
_DROPPED = frozenset(
    b"authorization connection cookie host keep-alive proxy-authorization proxy-connection referer x-ray-authorization "
    b"x-rayslurm-secret".split()
)
SECRET_HEADER = "X-Rayslurm-Secret"


@dataclass(frozen=True)
class Answer:
    """An HTTP response of the proxy itself, such as an error; `location` is the target of a redirect, "" if there is none."""

    status: str
    text: str
    location: str = ""

    def encode(self) -> bytes:
        """Returns the bytes of the HTTP response."""
        body = (self.text + "\n").encode()
        lines = [f"HTTP/1.1 {self.status}", "Content-Type: text/plain; charset=utf-8", f"Content-Length: {len(body)}"]
        lines += ["Cache-Control: no-store", "Connection: close", *([f"Location: {self.location}"] if self.location else [])]
        return "\r\n".join([*lines, "", ""]).encode() + body


_BAD = Answer("400 Bad Request", "This is no request that the proxy understands.")
_UNANSWERED = Answer(
    "502 Bad Gateway",
    "The request was sent, and no answer came. It is not sent again, because it may have had an effect.",
)
_FORBIDDEN = Answer("403 Forbidden", "Use the URL that `rayslurm dashboard` prints, as the user who runs it.")


def rewritten(head: bytes, secret: str, token: str, port: int, strips: bool = True) -> bytes | Answer:
    """Returns the head of an HTTP request to send to the service, or a response of the proxy itself to send to the client. Pure.

    A response of the proxy refuses or redirects the request. The new head asks the service to close the connection after the
    response, because the proxy reads one request per connection.

    Args:
        head: The head of the client's request.
        secret: The secret that the client must send in the path or in a header. Other requests are refused.
        token: The token that the service expects in the new head; "" for a service without a token.
        port: The port of the service on the head node, for the new head.
        strips: True to remove the secret from the path; False for a service whose own paths begin with the secret.
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
            if upgrade.lower() != b"websocket":  # HTTP/2, say, which a server may ignore and then keep the connection.
                upgrade = b""
                continue
        if name.lower() not in _DROPPED:
            kept.append(line)
    kept.append(b"Host: 127.0.0.1:%d" % port)
    kept.append(b"Connection: " + (b"Upgrade" if upgrade else b"close"))
    if token:
        kept.append(b"Authorization: Bearer " + token.encode())
    return b"\r\n".join([method + b" /" + path + b" HTTP/1.1", *kept, b"", b""])


class Proxy:
    """An HTTP server on the loopback address of this machine that serves one HTTP port of a cluster's head node."""

    def __init__(self, upstream: Head, token: str, port: int, secret: str | None = None) -> None:
        """Creates a proxy for the service that `upstream` reaches at `port`; requests to the service get the token `token`.

        `secret` is the first part of all paths of the service. If `secret` is None, the paths have no such part; the proxy then
        chooses a secret for its own URL.
        """
        self._upstream, self._token, self._port, self._strips = upstream, token, port, secret is None
        self._secret = secret or secrets.token_urlsafe(24)
        self._server: asyncio.Server | None = None
        self._link = ""  # The path of the link that `link` made last; "" once it was used.
        self.url = ""  # Set by `start`; without a slash at the end, as tools append paths to it.

    async def start(self, port: int = 0) -> None:
        """Starts to listen on `port` of this machine, or on any free port if `port` is 0; raises OSError if the port is taken."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=_LONGEST_HEAD)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/{self._secret}"

    def link(self) -> str:
        """Returns a new URL that works once, and redirects to the service.

        The link is meant for the command line of a browser. Other users can see the arguments of commands, but the link does not
        contain the proxy's secret, and does not work again after the browser has used it.
        """
        self._link = f"/{secrets.token_urlsafe(24)}"
        return self.url.rpartition("/")[0] + self._link

    async def close(self) -> None:
        """Stops listening; open connections end with the event loop."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection of a client: answers one request, and closes the connection."""
        try:
            answer = await self._answer(reader, writer)
            if answer is not None:
                writer.write(answer.encode())
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # The client has gone, or the proxy ends. (Before Python 3.11.8 asyncio prints a cancellation.)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer | None:
        """Serves one request of a client; returns None if the service has answered the client.

        Otherwise returns the response that the caller must send to the client, such as a refusal or an error.
        """
        if not is_own(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
            return _FORBIDDEN
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_TIMEOUT)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            return _BAD
        if self._link and head.startswith(b"GET %s HTTP/1." % self._link.encode()):
            self._link = ""
            return Answer("302 Found", "The page has moved.", f"/{self._secret}/")
        request = rewritten(head, self._secret, self._token, self._port, self._strips)
        if isinstance(request, Answer):
            return request
        for _ in range(_TRIES):  # The stream may break under a request, and comes again.
            try:
                await self._upstream.until_ready(_LINK_TIMEOUT)
            except asyncio.TimeoutError:
                return Answer("504 Gateway Timeout", "The Ray cluster is out of reach now; rayslurm keeps trying.")
            try:
                if await self._upstream.forward(request, reader, writer):
                    return None
            except Unanswered:
                return _UNANSWERED
            await asyncio.sleep(_PAUSE)
        return Answer("502 Bad Gateway", "The dashboard gave no answer; it may have ended.")
