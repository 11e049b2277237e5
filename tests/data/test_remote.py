"""Files at URLs: a copy is whole or not there, all ranks have the same one, and what goes wrong is one line.
The services are a folder and an HTTP server."""

import json
import multiprocessing
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.local import LocalFileSystem

from lib import InputError
from lib.data import remote
from lib.data.dataset import data_sources_of
from tests.common import ROOT, TOY_MODEL, Handler, fork, full_disk, http_server, one_line, ran, run_ranks

ROWS = (ROOT / "data/toy/val.jsonl").read_bytes()
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(remote, "copies", {})
    return tmp_path / "hf/plainrl"


@pytest.fixture
def store(cache, tmp_path, monkeypatch) -> SimpleNamespace:
    """A folder by a URL. copied: the names of files, as they are copied."""
    files = {"rows/train.jsonl": ROWS, "model/config.json": b"{}", "model/model.safetensors": b"weights"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found, get_file = SimpleNamespace(url=f"file://{tmp_path}", copied=[]), LocalFileSystem.get_file

    def noting(self, rpath, *args, **how):
        found.copied.append(Path(rpath).name)
        get_file(self, rpath, *args, **how)

    monkeypatch.setattr(LocalFileSystem, "get_file", noting)
    return found


def in_a_new_process(url: str, **how) -> Path:
    remote.copies.clear()
    return Path(remote.local_copy(url, **how))


def whole_copies(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*") if path.is_dir() and path.suffix != ".part"]


def test_a_file_is_copied_once_and_again_when_it_has_changed(store, cache, tmp_path):
    url = f"{store.url}/rows/train.jsonl"
    copy = in_a_new_process(url)
    assert copy.read_bytes() == ROWS and copy.is_relative_to(cache)
    assert in_a_new_process(url, weights=False) == copy == in_a_new_process(url) and len(store.copied) == 1
    assert data_sources_of([(str(copy), [{}])]) == ["train"]  # as of a local file
    assert data_sources_of([(str(copy), [{}]), ("x/train.jsonl", [{}])])[0] == "rows/train"
    (tmp_path / "rows/train.jsonl").write_bytes(ROWS[::-1])
    assert remote.local_copy(url) == str(copy)  # within a run the rows stay
    assert in_a_new_process(url).read_bytes() == ROWS[::-1] and len(store.copied) == 2


def test_what_is_no_url_stays():
    for name in ("", "Qwen/Qwen2.5-7B", "openai/gsm8k:main:train", "C:/x.jsonl", "/a://b", "s3:/bucket", "bash:x"):
        assert remote.local_copy(name) == name


def test_weights_of_a_folder_are_copied_only_where_they_are_read(store, tmp_path):
    (tmp_path / "model/global_step_5").mkdir()
    (tmp_path / "model/global_step_5/optim.pt").touch()
    without = in_a_new_process(f"{store.url}/model", weights=False)
    assert [path.name for path in without.iterdir()] == ["config.json"] and without.name == "model"
    whole = Path(remote.local_copy(f"{store.url}/model"))
    assert {path.name for path in whole.iterdir()} == {"config.json", "model.safetensors"}
    assert remote.local_copy(f"{store.url}/model", weights=False) == str(whole)  # not a third one
    assert store.copied[0] == "config.json" and sorted(store.copied[1:]) == ["config.json", "model.safetensors"]
    with one_line("no file in the folder"):
        remote.local_copy(f"{store.url}/model/global_step_5", weights=False)


def raises(error: Exception):
    def act(*_, **__):
        raise error

    return act


def without_version(self, path, **_):
    return {"name": path, "type": "file", "size": len(ROWS)}


def ends_early(self, rpath, lpath, **_):
    Path(lpath).write_bytes(Path(rpath).read_bytes()[:1000])


@pytest.mark.parametrize(
    "what, act, message",
    [
        ("info", raises(FileNotFoundError("b/x")), "FileNotFoundError: b/x; check the URL"),
        ("info", raises(ConnectionError("unreachable\nand more")), "ConnectionError: unreachable; check"),
        ("info", raises(ImportError("Install shopfs")), "Install shopfs; install that package"),
        ("info", without_version, "no ETag"),
        ("get_file", raises(ConnectionResetError("https://x/y?Signature=hunter22")), "https://x/y?...; check"),
        ("get_file", ends_early, f"1000 of the {len(ROWS)} bytes of train.jsonl came"),
    ],
)
def test_what_goes_wrong_is_one_line_and_leaves_no_copy(store, cache, monkeypatch, what, act, message):
    url = f"{store.url}/rows/train.jsonl"
    with monkeypatch.context() as broken, one_line(f"^{re.escape(url)}: .*{re.escape(message)}"):
        broken.setattr(LocalFileSystem, what, act)
        remote.local_copy(url)
    assert not whole_copies(cache) and not remote.copies
    assert in_a_new_process(url).read_bytes() == ROWS  # the next start


@pytest.mark.parametrize(
    "url, message",
    [
        ("s3://bucket/x.parquet", "Install s3fs"),
        ("hdfs://namenode:8020/model", "install Java and Hadoop's libhdfs"),
        ("nowhere://x/y", "Protocol not known: nowhere"),
    ],
)
def test_a_missing_package_is_named(cache, url, message):
    with one_line(message):
        remote.local_copy(url)


def test_a_copy_that_was_killed_in_the_middle_is_made_anew(store, cache, monkeypatch):
    begun, url = FORK.Event(), f"{store.url}/rows/train.jsonl"

    def halfway(*paths, **how):
        ends_early(*paths, **how)
        begun.set()
        threading.Event().wait()

    with monkeypatch.context() as slow:
        slow.setattr(LocalFileSystem, "get_file", halfway)
        process = FORK.Process(target=remote.local_copy, args=(url,))
        process.start()
        assert begun.wait(60)
        process.kill()
        process.join()
    assert len(list(cache.glob("*.part"))) == 1
    assert in_a_new_process(url).read_bytes() == ROWS
    assert not list(cache.glob("*.part"))


def test_a_full_or_unwritable_cache_is_one_line(store, cache):
    with full_disk(100), pytest.raises(InputError, match=r"cannot be copied to .*; make room, or set HF_HOME"):
        remote.local_copy(f"{store.url}/rows/train.jsonl")
    assert not whole_copies(cache)
    shutil.rmtree(cache)
    cache.write_text("a file")
    with pytest.raises(InputError, match=r"cannot be copied to .*File exists.*set HF_HOME"):
        remote.local_copy(f"{store.url}/rows/train.jsonl")


# ---- HTTP ----------------------------------------------------------------------------------------
@pytest.fixture
def server():
    """Serves `files` under `url`. asked: the requests; before_get: called before the first byte of an answer."""

    class Files(Handler):
        def do_HEAD(self):
            served.asked.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            if path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/refused?X-Amz-Signature=hunter22")
            elif path not in served.files:
                self.send_response(403 if path == "/refused" else 404)
            else:
                if self.command == "GET":
                    served.before_get()
                self.send_response(200)
                self.send_header("ETag", str(hash(served.files[path])))
                self.send_header("Content-Length", str(len(served.files[path])))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(served.files[path])
                return
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

    served = SimpleNamespace(files={"/rows.jsonl": ROWS}, asked=[], before_get=lambda: None)
    with http_server(Files) as served.url:
        yield served


def test_https_like_files_come_by_one_request_and_no_signature_is_shown(cache, server):
    copy = in_a_new_process(f"{server.url}/rows.jsonl?download=1")
    assert copy.name == "rows.jsonl" and copy.read_bytes() == ROWS
    assert server.asked == ["HEAD /rows.jsonl?download=1", "GET /rows.jsonl?download=1"]
    for path, status in {"moved": "403", "absent.jsonl": "404"}.items():
        with one_line(f"^(?!.*hunter22).*{status}"):
            remote.local_copy(f"{server.url}/{path}")


def _copy(world, url: str) -> str:
    return remote.local_copy(url)


def test_two_jobs_on_one_node_copy_a_file_once(cache, server):
    """The answer waits until both know that they need it."""
    both = threading.Event()
    server.before_get = lambda: both.wait(60)

    def watch():
        while sum(asked.startswith("HEAD") for asked in server.asked) < 2:
            threading.Event().wait(0.01)
        both.set()

    threading.Thread(target=watch, daemon=True).start()
    one, other = run_ranks(2, _copy, f"{server.url}/rows.jsonl")  # without LOCAL_RANK each is the first of its job
    assert one == other and Path(one).read_bytes() == ROWS
    assert sum(asked.startswith("GET") for asked in server.asked) == 1


def test_a_run_on_two_ranks_reads_models_and_rows_at_urls(tmp_path, cache, server, monkeypatch):
    """One download for both; config.json keeps the URLs; a resume sees other rows; a dry run copies no weights."""
    url, model = f"{server.url}/rows.jsonl", f"file://{TOY_MODEL}"
    flags = ["--model", model, "--train-files", url, "--val-files", "none", "--prompts-per-step", "4"]
    flags += ["--group-size", "2", "--no-export-model", "--save-every", "1", "--run-name", "run", "--resume", "auto"]
    printed = ran(fork("grpo", tmp_path, *flags, "--dry-run", "1")).stdout
    assert f"from {url}" in printed and not list(cache.rglob("*.safetensors"))
    shutil.rmtree(cache)
    server.asked.clear()

    ran(fork("grpo", tmp_path, *flags, "--total-steps", "1", ranks=2))
    assert server.asked == ["HEAD /rows.jsonl", "GET /rows.jsonl", "HEAD /rows.jsonl"]  # rank 0, then rank 1
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["model"] == model and config["train_files"] == [url] and str(cache) not in json.dumps(config)

    server.files["/rows.jsonl"] = b"".join(reversed(ROWS.splitlines(keepends=True)))
    refused = fork("grpo", tmp_path, *flags, "--total-steps", "2")
    assert refused.returncode == 2 and f"--train-files ['{url}'] holds other data" in refused.stderr
