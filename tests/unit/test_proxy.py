"""Tests: the proxy adds Ray's token, and serves its own user alone."""

import asyncio
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dagster_rayslurm.access.peer import owner
from dagster_rayslurm.access.proxy import SECRET_HEADER, Answer, Proxy, rewritten

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
PEER, HERE = ("127.0.0.1", 54321), ("127.0.0.1", 8265)


def request(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode()


def headers(head: bytes | Answer) -> dict[str, str]:
    assert isinstance(head, bytes), head
    pairs = [line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line]
    assert len({name.lower() for name, _ in pairs}) == len(pairs), "a header is there twice"
    return {name.lower(): value for name, value in pairs}


def test_a_request_gets_the_token_and_keeps_its_other_headers() -> None:
    head = rewritten(
        request(
            "POST /s3cret/api/jobs/?x=%2F HTTP/1.1", "Host: 127.0.0.1:1", "Connection: keep-alive", "AUTHORIZATION: Bearer other",
            "Cookie: jupyter=abc", "Referer: http://127.0.0.1:1/s3cret/", "Content-Length: 3", "X-Ray-Authorization: Bearer z",
        ),
        "s3cret", "t0ken", 8265,
    )  # fmt: skip
    assert isinstance(head, bytes) and head.startswith(b"POST /api/jobs/?x=%2F HTTP/1.1\r\n") and head.endswith(b"\r\n\r\n")
    sent = {"host": "127.0.0.1:8265", "connection": "close", "authorization": "Bearer t0ken", "content-length": "3"}
    assert headers(head) == sent
    assert b"s3cret" not in head


def test_the_secret_may_be_a_header_which_does_not_go_on() -> None:
    head = rewritten(request("GET /api/jobs/ HTTP/1.1", f"{SECRET_HEADER}: s3cret"), "s3cret", "t", 1)
    assert isinstance(head, bytes) and head.startswith(b"GET /api/jobs/ HTTP/1.1\r\n") and b"s3cret" not in head
    for wrong in ("", "s3cre", "s3cret2"):
        answer = rewritten(request("GET /s3cret/api/jobs/ HTTP/1.1", f"{SECRET_HEADER}: {wrong}"), "s3cret", "t", 1)
        assert isinstance(answer, Answer) and answer.status.startswith("403")


def test_a_service_that_knows_the_secret_gets_the_path_as_it_is() -> None:
    head = rewritten(request("GET /s3cret/lab?x HTTP/1.1"), "s3cret", "t", 1, strips=False)
    assert isinstance(head, bytes) and head.startswith(b"GET /s3cret/lab?x HTTP/1.1\r\n")
    refused = rewritten(request("GET /lab?x HTTP/1.1"), "s3cret", "t", 1, strips=False)
    assert isinstance(refused, Answer) and refused.status.startswith("403")


def test_a_websocket_is_let_through() -> None:
    head = rewritten(request("GET /s/logs HTTP/1.1", "Upgrade: websocket", "Connection: keep-alive, Upgrade"), "s", "t", 1)
    assert headers(head)["connection"] == "Upgrade" and headers(head)["upgrade"] == "websocket"


def test_an_upgrade_to_anything_else_is_not_offered() -> None:
    """A server may ignore it and keep the connection, whose later requests would get no token (as of Java's HTTP client)."""
    head = rewritten(request("GET /s/ HTTP/1.1", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings"), "s", "t", 1)
    assert headers(head)["connection"] == "close" and "upgrade" not in headers(head)


def test_a_cluster_without_authentication_gets_no_token() -> None:
    assert "authorization" not in headers(rewritten(request("GET /s/ HTTP/1.1"), "s", "", 1))


@pytest.mark.parametrize("target", ["/", "/api/version", "/s3cre", "/s3cret2/", "//s3cret/", "/S3CRET/", "/?s3cret/"])
def test_without_the_secret_nothing_is_let_through(target: str) -> None:
    answer = rewritten(request(f"GET {target} HTTP/1.1"), "s3cret", "t", 1)
    assert isinstance(answer, Answer) and answer.status.startswith("403") and b"s3cret" not in answer.encode()


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        request("GET http://127.0.0.1/s/ HTTP/1.1"),
        request("GET /s/ HTTP/2"),
        request("GET /s/ HTTP/1.1", "X: 1", " folded"),
        request("GET /s/ HTTP/1.1", "Connection : close"),
        request("GET /s/ HTTP/1.1", "no colon"),
        request("GET /s/\nX: y HTTP/1.1"),
    ],
)
def test_what_is_no_plain_request_is_refused(head: bytes) -> None:
    answer = rewritten(head, "s", "t", 1)
    assert isinstance(answer, Answer) and answer.status.startswith("400")


def test_a_missing_slash_is_added() -> None:
    answer = rewritten(request("GET /s HTTP/1.1"), "s", "t", 1)
    assert isinstance(answer, Answer) and b"\r\nLocation: /s/\r\n" in answer.encode()


ROW = "   1: {} {} {} 00000000:00000000 00:00000000 00000000  1001        0 123 1 0000000000000000 20 4 30 10 -1"


def test_the_user_behind_a_connection_is_known() -> None:
    peer, here = "0100007F:D431", "0100007F:2049"
    mapped = [f"0000000000000000FFFF0000{each}" for each in (peer, here)]
    server_side = ROW.format(here, peer, "01").replace("1001", "7")
    assert owner(PEER, HERE, ["  sl  local_address", server_side, ROW.format(peer, here, "01")]) == 1001
    assert owner(PEER, HERE, [ROW.format(*mapped, "01")]) == 1001, "by a socket for IPv6"
    # A connection that its process has closed belongs to root in the table.
    assert owner(PEER, HERE, [server_side, ROW.format(peer, here, "05")]) is None


class Upstream:
    """Answers each request with its head."""

    def __init__(self, failures: int = 0, ready: bool = True) -> None:
        self.failures, self.ready = failures, ready
        self.asked = 0

    async def until_ready(self, timeout: float) -> None:
        if not self.ready:
            raise asyncio.TimeoutError

    async def forward(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.asked += 1
        if self.asked <= self.failures:
            return False
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + first)
        await writer.drain()
        return True


def with_proxies(work: Callable[..., Awaitable[None]], *upstreams: Upstream) -> None:
    async def run() -> None:
        proxies = [Proxy(upstream, f"token-{number}", 8265) for number, upstream in enumerate(upstreams)]
        for proxy in proxies:
            await proxy.start()
        await work(*(proxy.url for proxy in proxies))
        for proxy in proxies:
            await proxy.close()

    asyncio.run(run())


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_two_proxies_at_once_each_with_its_own_secret_and_token() -> None:
    async def work(one: str, two: str) -> None:
        for url, token in ((one, "token-0"), (two, "token-1")):
            status, text = await asyncio.to_thread(get, f"{url}/api/version")
            assert status == 200 and f"Bearer {token}" in text
        crossed = two.rpartition("/")[0] + "/" + one.rpartition("/")[2] + "/api/version"
        assert (await asyncio.to_thread(get, crossed))[0] == 403

    with_proxies(work, Upstream(), Upstream())


def test_a_request_waits_for_a_lost_stream_and_says_when_it_does_not_come() -> None:
    async def work(again: str, never: str, mute: str) -> None:
        assert (await asyncio.to_thread(get, f"{again}/x"))[0] == 200
        status, text = await asyncio.to_thread(get, f"{never}/x")
        assert status == 504 and "out of reach" in text
        assert (await asyncio.to_thread(get, f"{mute}/x"))[0] == 502

    with_proxies(work, Upstream(failures=1), Upstream(ready=False), Upstream(failures=99))


GET = """
import sys, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=20).read())
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="another user is needed")
def test_another_user_gets_nothing_even_with_the_url() -> None:
    upstream = Upstream()

    async def work(url: str) -> None:
        for user, said in ((NOBODY, "403"), ([], "Bearer token-0")):
            command: list[Any] = [*user, shutil.which("python3", path="/usr/bin") or sys.executable, "-c", GET, f"{url}/x"]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert said in done.stdout, done
        assert upstream.asked == 1, "the other user's request has reached Ray"

    with_proxies(work, upstream)


def test_it_listens_on_the_loopback_address_alone() -> None:
    async def work(url: str) -> None:
        assert url.startswith("http://127.0.0.1:") and len(url.rpartition("/")[2]) >= 32

    with_proxies(work, Upstream())
