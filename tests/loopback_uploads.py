"""What the loopback hub does with uploads: accounts, new repositories, LFS in parts, commits, and what it then shows.

The store takes parts only at addresses that it has given, and forgets those of an upload for which it is asked anew, as
the hub's does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import yaml

if TYPE_CHECKING:
    from tests.loopback_hub import LoopbackHub

Answer = tuple[int, dict[str, str], bytes]


def account(name: str = "me", role: str = "write", orgs: tuple[tuple[str, str], ...] = (), **scopes: Any) -> Any:
    """What the hub says of a token's account; ``scopes`` of a fine-grained one: entity's name to permissions."""
    given: dict[str, Any] = {"displayName": "pod", "role": role}
    if role == "fineGrained":
        scoped = [
            {"entity": {"type": "user", "name": entity}, "permissions": rights} for entity, rights in scopes.items()
        ]
        given["fineGrained"] = {"canReadGatedRepos": True, "global": [], "scoped": scoped}
    return {
        "type": "user",
        "name": name,
        "orgs": [{"name": org, "roleInOrg": kind} for org, kind in orgs],
        "auth": {"type": "access_token", "accessToken": given},
    }


@dataclass
class Store:
    """Bytes by their sha256, and uploads under way."""

    part_size: int | None = 40_000  # bytes; None: one PUT
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    uploads: int = 0
    received: list[int] = field(default_factory=list)  # bytes of each PUT that was taken


def answer(hub: LoopbackHub, method: str, path: str, body: bytes, token: str | None) -> Answer | None:
    """The answer to a request about uploads; None for any other."""
    if path.startswith("/store/"):
        return _store(hub, method, path, body)
    if path == "/api/whoami-v2":
        found = hub.accounts.get(token or "")
        return _json(found) if found else _refuse(401, "Invalid credentials in Authorization header")
    if path == "/api/validate-yaml":
        yaml.safe_load(json.loads(body)["content"].split("---")[1])
        return _json({"warnings": [], "errors": []})
    if path == "/api/repos/create":
        return _create(hub, json.loads(body), token)
    if found := re.fullmatch(
        r"/api/models/([^/]+/[^/]+?)(?:/(preupload|commit|paths-info|xet-write-token)/(\w+))?", path
    ):
        return _of_repository(hub, found[1], found[2] or "", body, token)
    if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
        return _batch(hub, found[1], json.loads(body), token)
    return None


def _json(value: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _refuse(status: int, message: str, code: str = "") -> Answer:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return status, headers, json.dumps({"error": message}).encode()


def _writes(hub: LoopbackHub, repo: str, token: str | None) -> bool:
    found = hub.accounts.get(token or "")
    if not found:
        return False
    given = found["auth"]["accessToken"]
    rights = {scope["entity"]["name"]: scope["permissions"] for scope in given.get("fineGrained", {}).get("scoped", ())}
    owner = repo.partition("/")[0]
    member = owner == found["name"] or any(org["name"] == owner and org["roleInOrg"] != "read" for org in found["orgs"])
    return member and (given["role"] == "write" or "repo.write" in rights.get(owner, ()))


def _create(hub: LoopbackHub, wanted: dict[str, Any], token: str | None) -> Answer:
    from tests.loopback_hub import Repo

    repo = f"{wanted['organization']}/{wanted['name']}"
    if not _writes(hub, repo, token):
        return _refuse(403, "You don't have the rights to create a model under this namespace")
    if repo in hub.repos:
        return _refuse(409, "You already created this model repo")
    folder = hub.made / repo.replace("/", "--")
    folder.mkdir(parents=True)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    hub.repos[repo] = Repo(folder, private=wanted.get("visibility") == "private")
    return _json({"url": f"{hub.endpoint}/{repo}", "name": repo})


def _of_repository(hub: LoopbackHub, name: str, what: str, body: bytes, token: str | None) -> Answer:
    from tests.loopback_hub import listing

    repo = hub.repos.get(name)
    if repo is None or (repo.private and not _writes(hub, name, token)):
        return _refuse(404 if token else 401, "Repository not found", "RepoNotFound")
    if what == "":
        return _json(listing(name, repo))
    if what == "paths-info":
        wanted = parse_qs(body.decode())["paths"]
        entries = [entry for entry in listing(name, repo, plain=True) if entry["path"] in wanted]
        for entry in entries:
            if entry["path"] in repo.wrong_sums:
                entry["lfs"]["oid"] = "0" * 64
        return _json(entries)
    if not _writes(hub, name, token):
        return _refuse(403, "Forbidden: you must have write access to the content of this repo.")
    if what == "xet-write-token":
        xet = {"X-Xet-Cas-Url": hub.xet, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": "99999999999"}
        said = {"casUrl": hub.xet, "accessToken": "xet", "exp": 99999999999}
        return (200, xet, json.dumps(said).encode()) if hub.xet else _refuse(404, "Not found")
    if what == "preupload":
        there = {entry["path"]: entry.get("lfs", entry)["oid"] for entry in listing(name, repo, plain=True)}
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] > 100_000 else "regular",
                "shouldIgnore": False,
                "oid": there.get(file["path"]),
            }
            for file in json.loads(body)["files"]
        ]
        return _json({"files": files})
    return _commit(hub, name, body)


def _commit(hub: LoopbackHub, name: str, body: bytes) -> Answer:
    repo = hub.repos[name]
    header, *operations = [json.loads(line) for line in body.decode().splitlines()]
    for operation in operations:
        value = operation["value"]
        if operation["key"] == "lfsFile":
            if value["oid"] not in hub.store.objects:
                return _refuse(400, f"LFS object {value['oid']} does not exist")
            content = hub.store.objects[value["oid"]]
        else:
            content = base64.b64decode(value["content"])
        target = repo.folder / value["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    repo.history.append(header["value"]["summary"])
    repo.commit = hashlib.sha1(body).hexdigest()
    return _json({"commitUrl": f"{hub.endpoint}/{name}/commit/{repo.commit}", "commitOid": repo.commit})


def _batch(hub: LoopbackHub, name: str, wanted: dict[str, Any], token: str | None) -> Answer:
    if not _writes(hub, name, token):
        return _refuse(403, "Forbidden: you must have write access to the content of this repo.")
    store, objects = hub.store, []
    for one in wanted["objects"]:
        oid, size = one["oid"], one["size"]
        entry: dict[str, Any] = {"oid": oid, "size": size}
        if oid not in store.objects:
            store.uploads += 1
            here = f"{hub.cdn.removesuffix('/cdn')}/store/{oid}/{store.uploads}"
            store.parts[f"{oid}/{store.uploads}"], store.sizes[oid] = {}, size
            header = {}
            if store.part_size:
                count = math.ceil(size / store.part_size)
                header = {str(n): f"{here}/{n}?sig=SECRET" for n in range(1, count + 1)}
                header["chunk_size"] = str(store.part_size)
            verify = {"href": f"{hub.endpoint}/store/verify"}
            entry["actions"] = {"upload": {"href": f"{here}/0?sig=SECRET", "header": header}, "verify": verify}
        objects.append(entry)
    return _json({"transfer": "multipart", "objects": objects})


def _store(hub: LoopbackHub, method: str, path: str, body: bytes) -> Answer:
    store = hub.store
    if path == "/store/verify":
        there = store.objects.get(json.loads(body)["oid"])
        return _json({}) if there is not None else _refuse(404, "no such object")
    _, _, oid, upload, number = path.split("/")
    parts = store.parts.get(f"{oid}/{upload}")
    if parts is None:
        return _refuse(403, "Request has expired")
    if method == "PUT":
        parts[int(number)] = body
        store.received.append(len(body))
        if number != "0":
            return 200, {"ETag": f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'}, b""
        content = body
    else:
        tags = [part["etag"] for part in json.loads(body)["parts"]]
        there = [f'"{hashlib.md5(parts[n], usedforsecurity=False).hexdigest()}"' for n in sorted(parts)]
        if tags != there:
            return _refuse(400, "InvalidPart")
        content = b"".join(parts[n] for n in sorted(parts))
    if hashlib.sha256(content).hexdigest() != oid or len(content) != store.sizes[oid]:
        return _refuse(400, "checksum mismatch")
    store.objects[oid] = content
    del store.parts[f"{oid}/{upload}"]
    return 200, {"ETag": '"whole"'}, b"{}"


def read_repository(hub: LoopbackHub, name: str) -> dict[str, Path]:
    """The files of a repository by their paths in it."""
    return hub.repos[name].files()
