from __future__ import annotations

import base64
import os

import httpx
import pytest
from served import Served


def upload(served: Served, sandbox: str, path: str, data: bytes, **fields: object) -> httpx.Response:
    body = {"path": path, "content": base64.b64encode(data).decode(), **fields}
    return served.api.post(f"/sandboxes/{sandbox}/files", json=body)


def raw(served: Served, sandbox: str, path: str, data: bytes, **query: str) -> httpx.Response:
    return served.api.put(f"/sandboxes/{sandbox}/files/raw", params={"path": path, **query}, content=data)


def get(served: Served, sandbox: str, path: str, **query: str) -> httpx.Response:
    return served.api.get(f"/sandboxes/{sandbox}/files/raw", params={"path": path, **query})


def test_there_and_back(served: Served, sandbox: str) -> None:
    data = bytes(range(256)) * 9
    done = upload(served, sandbox, "a/b c/f", data)
    assert (done.status_code, done.json()) == (200, {"success": True, "path": "a/b c/f", "size": len(data)})
    told = served.api.get(f"/sandboxes/{sandbox}/files", params={"path": "/workspace/a/b c/f"}).json()
    assert (base64.b64decode(told["content"]), told["size"]) == (data, len(data))
    assert served.exec(sandbox, ["stat", "-c", "%a", "a/b c/f"])["stdout"] == "644\n"
    assert upload(served, sandbox, "a/b c/f", b"x", mode="0755").status_code == 200
    assert served.exec(sandbox, ["stat", "-c", "%a %s", "a/b c/f"])["stdout"] == "755 1\n"


def test_raw_bodies_in_pieces(served: Served, sandbox: str) -> None:
    data = os.urandom(3 << 20)
    third = 1 << 20
    for offset in (0, third, third, 2 * third):  # a piece whose answer was lost is sent again
        answer = raw(served, sandbox, "big", data[offset : offset + third], offset=str(offset), mode="0600")
        assert answer.status_code == 200
    assert answer.json()["size"] == len(data)
    assert served.exec(sandbox, ["stat", "-c", "%a", "big"])["stdout"] == "600\n"
    whole = get(served, sandbox, "big")
    assert whole.content == data and whole.headers["X-File-Size"] == str(len(data))
    piece = get(served, sandbox, "big", offset=str(third - 1), length="3")
    assert piece.content == data[third - 1 : third + 2] and piece.headers["X-File-Size"] == str(len(data))
    assert get(served, sandbox, "big", offset=str(4 * third), length="9").content == b""
    assert raw(served, sandbox, "big", b"new", offset="0").json()["size"] == 3
    assert get(served, sandbox, "big").content == b"new"
    beyond = raw(served, sandbox, "big", b"x", offset="4")
    assert beyond.status_code == 422 and "has 3 bytes" in beyond.json()["detail"]
    assert raw(served, sandbox, "none", b"x", offset="4").status_code == 404


def test_the_list(served: Served, sandbox: str) -> None:
    served.exec(sandbox, "touch -d '2001-02-03T04:05:06Z' f; mkdir d; ln -s nowhere l; mkfifo p; printf 12345 > g")
    told = served.api.get(f"/sandboxes/{sandbox}/files/list").json()
    assert told["path"] == "/workspace"
    entries = {e["name"]: e for e in told["files"]}
    assert {n: e["type"] for n, e in entries.items()} == {
        "f": "file",
        "g": "file",
        "d": "directory",
        "l": "symlink",  # a dangling one is Orchard's 500
        "p": "other",
    }
    assert entries["f"]["modified"] == "2001-02-03T04:05:06" and entries["f"]["mtime"] == 981173106
    assert (entries["g"]["size"], type(entries["g"]["size"])) == (5, int)


def test_paths_of_the_wrong_kind(served: Served, sandbox: str) -> None:
    served.exec(sandbox, "mkdir d; touch f; mkfifo p; ln -s /etc/passwd l; truncate -s 1G sparse; ln -s loop loop")
    files = f"/sandboxes/{sandbox}/files"

    def download(path: str) -> tuple[int, str]:
        answer = served.api.get(files, params={"path": path})
        return answer.status_code, answer.json()["code"]

    assert download("none") == (404, "unknown")
    for path in ("d", "p", "/dev/zero", "f/x", "loop"):
        assert download(path) == (400, "wrong_kind"), path
    assert download("sparse") == (413, "too_large")
    assert get(served, sandbox, "sparse", offset="1000000000", length="2").content == b"\0\0"
    listing = served.api.get(f"{files}/list", params={"path": "f"})
    assert listing.status_code == 400 and "f" in listing.json()["detail"]
    assert served.api.get(f"{files}/list", params={"path": "none"}).status_code == 404
    for path in ("../etc/x", "/etc/passwd", "/workspace", "/workspace/../etc/x", "/tmp/../usr/x"):
        answer = upload(served, sandbox, path, b"x")
        assert (answer.status_code, answer.json()["code"]) == (400, "wrong_kind"), path
    # A link in the way is replaced, not followed; the sandbox's own passwd is the server's to write, not the agent's.
    assert upload(served, sandbox, "l", b"mine").status_code == 200
    assert served.exec(sandbox, "cat l; grep -c mine /etc/passwd")["stdout"] == "mine0\n"
    served.exec(sandbox, "ln -s /etc/hosts l2")
    assert raw(served, sandbox, "l2", b"x", offset="1").status_code == 400


def test_bodies_that_make_no_sense(served: Served, sandbox: str) -> None:
    files = f"/sandboxes/{sandbox}/files"
    # Orchard drops what is no base64, and the file is another one.
    for content in ("a*Gk=", "aGk", "ä"):
        answer = served.api.post(files, json={"path": "f", "content": content})
        assert answer.status_code == 422 and "base64" in answer.json()["detail"]
    assert served.api.post(files, json={"path": "f"}).status_code == 422
    assert served.api.post(files, json={"path": "", "content": ""}).status_code == 422
    assert served.api.post(files, json={"path": "a\0b", "content": ""}).status_code == 422
    assert served.api.post(files, json={"path": "f", "content": "", "mode": "999"}).status_code == 422
    assert raw(served, sandbox, "f", b"", mode="rwx").status_code == 422
    assert raw(served, sandbox, "f", b"", offset="-1").status_code == 422
    assert served.api.get(files).status_code == 422
    assert get(served, sandbox, "f", length="x").status_code == 422
    assert served.exec(sandbox, "ls")["stdout"] == ""


def test_a_name_that_is_too_long_leaves_nothing(served: Served, sandbox: str) -> None:
    answer = raw(served, sandbox, "/workspace/sub/" + "n" * 256, b"x")
    assert answer.status_code == 400
    assert "File name too long" in answer.json()["detail"]
    assert served.exec(sandbox, "ls -A sub")["stdout"] == ""


def test_a_full_disk_is_told(served: Served, sandbox: str) -> None:
    full = served.create(limits={"tmp_bytes": 1 << 20})["sandbox_id"]
    for size in (2 << 20, 30 << 20):  # the answer comes while most of the body is still on its way
        answer = raw(served, full, "/tmp/f", bytes(size))
        assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
    assert served.exec(full, "ls -A /tmp")["stdout"] == "", "nothing half-written is left"
    served.api.delete(f"/sandboxes/{full}")


@pytest.mark.parametrize("how", ["json", "raw"])
def test_twenty_mebibytes(served: Served, sandbox: str, how: str) -> None:
    data = os.urandom(20 << 20)
    if how == "raw":
        assert raw(served, sandbox, "big", data).json()["size"] == len(data)
        assert get(served, sandbox, "big").content == data
    else:
        assert upload(served, sandbox, "big", data).json()["size"] == len(data)
        told = served.api.get(f"/sandboxes/{sandbox}/files", params={"path": "big"}).json()
        assert base64.b64decode(told["content"]) == data
