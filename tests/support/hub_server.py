"""
A Hugging Face Hub of one process: as much of its HTTP interface as `huggingface_hub` uses to read, create and write
repositories without Xet. Those of Spaces and kernels are named `spaces:owner/name` and `kernels:owner/name` here.
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
from urllib.parse import parse_qs, unquote, urlsplit


OWNER, TOKEN = "someone", "hf_of_someone"
LARGE = 10_000  # bytes from which on a file is uploaded as a large one


@dataclass
class Repository:
    """Files by path in every commit, and the commit that each branch is at."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Puts files on top of a branch."""
        everything = self.commits.get(self.branches.get(branch, ""), {}) | files
        text = repr((len(self.commits), branch, sorted((path, _sha256(data)) for path, data in everything.items())))
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = everything
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch or hash names."""
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubServer(ThreadingHTTPServer):
    """
    `repositories` may be looked at and changed from outside. `cut_after[path] = n` breaks the connection once, after
    n bytes of the file.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.cut_after: dict[str, int] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # connections that break are part of the tests

    def publish(self, repo_id: str, files: dict[str, bytes], private: bool = False, branch: str = "main") -> str:
        """Commits files to a repository, made if there is none."""
        return self.repositories.setdefault(repo_id, Repository(private)).commit(files, branch)


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """A hub on a port of its own."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    ROUTES = (
        ("HEAD|GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "file"),
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", "tree"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/large/(?P<oid>[0-9a-f]{64})", "large"),
    )

    def log_message(self, *arguments: Any) -> None:
        pass

    def handle_request(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path, dict(self.headers)))
        path = re.sub(r"^/(api/)?(spaces|kernels)/", lambda m: f"/{'api/models/' if m[1] else ''}{m[2]}:", path)
        for methods, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split("|"):
                groups = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                if "repo" in groups and not self.may(groups["repo"]):
                    return self.fail(401, "RepoNotFound")
                return getattr(self, name)(body=body, **groups)
        self.fail(404, "NotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def may(self, repo: str) -> bool:
        """Whether the repository is there for who asks: read by all unless private, written by its owner."""
        found = self.server.repositories.get(repo)
        reads = self.command in ("GET", "HEAD")
        return found is not None and (self.is_owner() or (reads and not found.private))

    def answer(self, value: Any, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def fail(self, status: int, code: str, **headers: str) -> None:
        self.send(b"{}", status, {"X-Error-Code": code, "Content-Type": "application/json"} | headers)

    def send(self, data: bytes, status: int, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True

    # reading

    def file(self, repo: str, revision: str, path: str, body: bytes) -> None:
        found = self.server.repositories[repo]
        commit = found.resolve(revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        if path not in found.commits[commit]:
            return self.fail(404, "EntryNotFound", X_Repo_Commit=commit)
        data, status = found.commits[commit][path], 200
        headers = {"ETag": f'"{_sha256(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start:
            headers["Content-Range"] = f"bytes {start[1]}-{len(data) - 1}/{len(data)}"
            data, status = data[int(start[1]) :], 206
        cut = self.server.cut_after.pop(path, None) if self.command == "GET" else None
        self.send(data, status, headers, cut)

    def info(self, repo: str, body: bytes, revision: str = "main") -> None:
        found = self.server.repositories[repo]
        commit = found.resolve(revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        siblings = [{"rfilename": path} for path in found.commits[commit]]
        self.answer({"id": repo, "sha": commit, "private": found.private, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str, body: bytes) -> None:
        found = self.server.repositories[repo]
        commit = found.resolve(revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        files = found.commits[commit].items()
        self.answer([{"type": "file", "path": path, "size": len(data), "oid": _sha256(data)} for path, data in files])

    # writing

    def whoami(self, body: bytes) -> None:
        if not self.is_owner():
            return self.fail(401, "Unauthorized")
        self.answer({"type": "user", "name": OWNER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self, body: bytes) -> None:
        if not self.is_owner():
            return self.fail(401, "Unauthorized")
        wanted = json.loads(body)
        place = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        kind = f"{wanted.get('type', 'model')}s"
        repo = place if kind == "models" else f"{kind}:{place}"
        is_private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        is_new = repo not in self.server.repositories
        if is_new:
            self.server.publish(repo, {".gitattributes": b""}, is_private)
        url = f"{self.server.url}/{repo.replace(':', '/')}"
        self.answer({"url": url, "id": place}, 200 if is_new else 409)

    def validate(self, body: bytes) -> None:
        self.answer({"errors": [], "warnings": []})

    def branch(self, repo: str, revision: str, body: bytes) -> None:
        found = self.server.repositories[repo]
        if revision in found.branches:
            return self.fail(409, "Exists")
        found.branches[revision] = found.branches["main"]
        self.answer({})

    def preupload(self, repo: str, revision: str, body: bytes) -> None:
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self.answer({"files": modes})

    def batch(self, repo: str, body: bytes) -> None:
        objects = [
            {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": {"href": self.large_url(wanted)}}}
            for wanted in json.loads(body)["objects"]
        ]
        self.answer({"transfer": "basic", "objects": objects})

    def large_url(self, wanted: dict[str, Any]) -> str:
        return f"{self.server.url}/large/{wanted['oid']}"

    def large(self, oid: str, body: bytes) -> None:
        if _sha256(body) != oid:
            return self.fail(400, "BadHash")
        self.server.large_files[oid] = body
        self.answer({})

    def commit(self, repo: str, revision: str, body: bytes) -> None:
        found, files = self.server.repositories[repo], {}
        for line in filter(None, body.splitlines()):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.large_files[value["oid"]]
        query = parse_qs(urlsplit(self.path).query)
        is_proposal = query.get("create_pr") == ["1"]
        if is_proposal:
            revision = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in found.branches)}"
            found.branches[revision] = found.branches["main"]
        elif revision not in found.branches:
            return self.fail(404, "RevisionNotFound")
        sha = found.commit(files, revision)
        url = f"{self.server.url}/{repo.replace(':', '/')}"
        proposal = {"pullRequestUrl": f"{url}/discussions/{revision.rsplit('/', 1)[-1]}"} if is_proposal else {}
        self.answer({"commitUrl": f"{url}/commit/{sha}", "commitOid": sha} | proposal)
