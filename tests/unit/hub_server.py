"""A small Hub on this machine: the endpoints that an upload speaks, in memory, with a record of what was asked.

It is written after the documents of the Hub's API and of git-lfs, and knows nothing of the uploader. It can refuse, and
it can hold what is being sent, so that an upload may be interrupted amid a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_token_of_the_tests"
OWNER = "somebody"


def git_sha1(data: bytes) -> str:
    """How git names a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """A repository: its branches, each path -> content, and whether it is private."""

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b"*"}})
    num_commits: int = 1


class Hub:
    """The state of the server. `requests` are (method, path) as they came; `refusals` map a part of a path to a status.

    `hiccups` map a part of a path to the statuses of the next answers, after which all goes well.
    With `held`, only the first large file is taken in; others wait until it is set, and are lost.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.refusals: dict[str, int] = {}
        self.hiccups: dict[str, list[int]] = {}
        self.held: threading.Event | None = None
        self.has_begun = threading.Event()
        self.endpoint = ""
        self.lock = threading.Lock()

    def puts(self) -> list[str]:
        """The objects that were sent, by the SHA-256 under which they were announced."""
        return sorted(path.removeprefix("/object/") for method, path in self.requests if method == "PUT")


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub that serves on a free port as long as the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        path = self.path.split("?")[0]
        body = self._body()
        if path == "/api/agent-harnesses":  # newer clients ask for it, and do without
            self._answer(404, {})
            return
        with self.hub.lock:
            self.hub.requests.append((method, path))
        with self.hub.lock:
            hiccups = [left.pop(0) for part, left in self.hub.hiccups.items() if part in path and left]
        if hiccups:
            self._answer(hiccups[0], {"error": "not now"})
            return
        for part, status in self.hub.refusals.items():
            if part in path:
                self._answer(status, {"error": f"refused with {status}"})
                return
        if method == "PUT":
            self._store(path, body)
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
            return
        with self.hub.lock:
            status, content = self._content(method, path, body)
        self._answer(status, content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _store(self, path: str, body: bytes) -> None:
        oid = path.removeprefix("/object/")
        assert hashlib.sha256(body).hexdigest() == oid, "the content is not that which was announced"
        if self.hub.held is not None:
            with self.hub.lock:
                if first := not self.hub.objects:
                    self.hub.objects[oid] = body
            if not first:
                self.hub.has_begun.set()
                self.hub.held.wait()
                self.close_connection = True
                return
        self.hub.objects[oid] = body
        self._answer(200, {})

    def _content(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": OWNER, "orgs": []}
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self._announced(one) for one in json.loads(body)["objects"]]}
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|branch|preupload|commit)/([^/]+))?", path)
        if found is None or found[1] not in self.hub.repos:
            return 404, {"error": "Repository not found"}
        repo, action, revision = self.hub.repos[found[1]], found[2], unquote(found[3] or "main")
        if action == "branch":
            if revision in repo.branches:
                return 409, {"error": "Reference already exists"}
            repo.branches[revision] = dict(repo.branches["main"])
            return 200, {}
        if revision not in repo.branches:
            return 404, {"error": f"Invalid rev id: {revision}"}
        files = repo.branches[revision]
        if (method, action) == ("POST", "commit"):
            return self._commit(found[1], files, [json.loads(line) for line in body.splitlines()])
        about: dict[str, Any] = {
            "id": found[1],
            "private": repo.private,
            "sha": f"{repo.num_commits:040x}",
            "siblings": [],
        }
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)} for name, data in files.items()
        ]
        modes = [_mode(one["path"], files) for one in json.loads(body)["files"]] if action == "preupload" else []
        return 200, {None: about, "revision": about, "tree": tree, "preupload": {"files": modes}}[action]

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        if name in self.hub.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.hub.endpoint}/{name}"}
        # Older clients say "private", newer ones "visibility".
        self.hub.repos[name] = Repo(private=bool(asked.get("private")) or asked.get("visibility") == "private")
        return 200, {"url": f"{self.hub.endpoint}/{name}"}

    def _announced(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.hub.objects:
            return {**asked}
        return {**asked, "actions": {"upload": {"href": f"{self.hub.endpoint}/object/{asked['oid']}"}}}

    def _commit(self, name: str, files: dict[str, bytes], lines: list[dict[str, Any]]) -> tuple[int, Any]:
        repo = self.hub.repos[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repo.num_commits += 1
        oid = f"{repo.num_commits:040x}"
        return 200, {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}", "commitOid": oid, "success": True}


def _mode(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """Whether a file is sent by itself (LFS) or within the commit, and what is there under its name."""
    is_large = path.endswith(".safetensors")
    answer: dict[str, Any] = {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
    if path in files:
        answer["oid"] = hashlib.sha256(files[path]).hexdigest() if is_large else git_sha1(files[path])
    return answer
