import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrel.data import corpus as module
from jaxrel.data.corpus import build, standard_library_corpus
from jaxrel.data.store import SPLITS, TokenStream, read_corpus
from jaxrel.data.text_files import find
from jaxrel.exit_codes import DataRefusedError, FailedError, JaxrelError, UsageError


def stream(folder: Path, split: str) -> bytes:
    tokens = TokenStream(folder, split)
    return bytes(tokens.read(0, tokens.split.tokens).astype("u1"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.core
def test_splits_hold_every_file_once_in_order_with_separators(
    tmp_path: Path, write_texts: Callable
) -> None:
    texts = write_texts(tmp_path / "texts", files=24, words=300)
    info = build([tmp_path / "texts"], tmp_path / "corpus", held_out=0.3)
    in_order = [texts[name] for name in sorted(texts)]
    documents = {}
    for split in SPLITS:
        data = stream(info.path, split)
        assert data.endswith(b"\0")
        documents[split] = data[:-1].split(b"\0")
        assert documents[split] == [text for text in in_order if text in documents[split]]
        said = info.corpus.splits[split]
        assert (said.tokens, said.files) == (len(data), len(documents[split]))
        assert said.content_hash == hashlib.blake2b(data, digest_size=16).hexdigest()
        assert said.records == -(-len(data) // info.corpus.chunk)
    assert sorted(documents["train"] + documents["held_out"]) == sorted(in_order)
    assert 0 < len(documents["held_out"]) < 12
    assert info.corpus.splits["train"].records > 1, "the corpus must span records"
    assert read_corpus(info.path) == info.corpus


def test_a_moved_folder_gives_the_same_bytes(texts: Path, corpus: Path, tmp_path: Path) -> None:
    # Copied file by file in another order: the directory's own order differs.
    for path in sorted((p for p in texts.rglob("*") if p.is_file()), reverse=True):
        copy = tmp_path / "elsewhere" / path.relative_to(texts)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    again = build([tmp_path / "elsewhere"], tmp_path / "corpus", held_out=0.2)
    assert content(again.path) == content(corpus)


def test_a_file_keeps_its_side_when_others_come_and_equal_files_share_one(
    tmp_path: Path, write_texts: Callable
) -> None:
    texts = write_texts(tmp_path / "texts", files=24, words=20)
    before = stream(build([tmp_path / "texts"], tmp_path / "one", held_out=0.3).path, "held_out")
    write_texts(tmp_path / "more", files=30, words=19)
    for name, text in texts.items():
        (tmp_path / "more" / f"copy-{name.replace('/', '-')}").write_bytes(text)
    after = build([tmp_path / "texts", tmp_path / "more"], tmp_path / "two", held_out=0.3).path
    held, train = stream(after, "held_out"), stream(after, "train")
    for text in texts.values():
        side = held if text in before else train
        assert side.count(text) == 2 and (held + train).count(text) == 2


def test_few_files_still_leave_one_on_each_side(tmp_path: Path, write_texts: Callable) -> None:
    write_texts(tmp_path / "texts", files=2, words=5)
    for held_out in (1e-9, 0.999):
        splits = build(
            [tmp_path / "texts"], tmp_path / f"c{held_out}", held_out=held_out
        ).corpus.splits
        assert {name: split.files for name, split in splits.items()} == {"train": 1, "held_out": 1}


def test_without_held_out_one_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alone")
    info = build([tmp_path / "a.txt"], tmp_path / "corpus", held_out=0)
    assert stream(info.path, "train") == b"alone\0"
    with pytest.raises(DataRefusedError, match="no held_out split"):
        TokenStream(info.path, "held_out")


@pytest.mark.core
def test_what_is_not_text_is_skipped_and_counted(tmp_path: Path, write_texts: Callable) -> None:
    folder = tmp_path / "texts"
    write_texts(folder, files=3, words=5)
    (folder / "binary").write_bytes(b"text\0text")
    (folder / "latin").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "empty").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "gone").symlink_to(folder / "nowhere")
    (folder / "itself").symlink_to(folder / "itself")
    os.mkfifo(folder / "pipe")
    (folder / "a" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "z-again.txt").symlink_to(folder / "a" / "000.txt")  # files come before folders
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "linked.txt").write_text("linked")
    (folder / "link").symlink_to(tmp_path / "outside", target_is_directory=True)

    files, skipped = find([folder, folder / "b"])
    names = [str(file.path.relative_to(folder)) for file in files]
    assert names == ["z-again.txt", "b/001.txt", "c/002.txt", "link/linked.txt"]
    assert skipped == {
        "binary": 1,
        "dangling link": 2,
        "empty": 1,
        "hidden": 1,
        "not UTF-8": 1,
        "not a file": 1,
        "seen before": 1,
    }


Case = Callable[[Path], dict]


def folder_of(files: dict[str, bytes]) -> Case:
    def prepare(tmp: Path) -> dict:
        (tmp / "in").mkdir()
        for name, data in files.items():
            (tmp / "in" / name).write_bytes(data)
        return {}

    return prepare


TWO = {"a": b"one text", "b": b"another"}


def with_texts(**arguments: object) -> Case:
    def prepare(tmp: Path) -> dict:
        folder_of(TWO)(tmp)
        return {key: tmp / v if isinstance(v, Path) else v for key, v in arguments.items()}

    return prepare


def out_with(files: dict[str, bytes]) -> Case:
    def prepare(tmp: Path) -> dict:
        folder_of(TWO)(tmp)
        (tmp / "out").mkdir()
        for name, data in files.items():
            (tmp / "out" / name).write_bytes(data)
        return {}

    return prepare


def another_corpus(tmp: Path) -> dict:
    folder_of(TWO)(tmp)
    (tmp / "other").write_text("other text")
    build([tmp / "other"], tmp / "out", held_out=0)
    return {}


def unreadable(tmp: Path) -> dict:
    folder_of(TWO)(tmp)
    (tmp / "in" / "c").symlink_to("/proc/self/mem")  # a regular file whose reading fails
    return {}


def dangling(tmp: Path) -> dict:
    (tmp / "in").symlink_to(tmp / "nowhere")
    return {}


BAD = {
    "no source": (with_texts(sources=[]), 64, "no source given"),
    "missing source": (lambda tmp: {}, 64, "no such source: .*in"),
    "dangling source": (dangling, 64, "no such source: .*in"),
    "empty folder": (folder_of({}), 65, "no text in .*in: no files"),
    "empty files": (folder_of({"a": b""}), 65, "no text in .*: 1 empty"),
    "only binary": (folder_of({"a": b"\0", "b": b"\xff\xfe"}), 65, "1 binary, 1 not UTF-8"),
    "one short file": (folder_of({"a": b"short"}), 65, "in/a is the only text"),
    "equal files": (folder_of({"a": b"same", "b": b"same"}), 65, "two different files"),
    "unreadable": (unreadable, 65, "cannot read .*in/c"),
    "negative share": (with_texts(held_out=-0.1), 64, "held_out is -0.1"),
    "all held out": (with_texts(held_out=1.0), 64, "held_out is 1.0"),
    "no number": (with_texts(held_out=float("nan")), 64, "held_out is nan"),
    "unknown tokenizer": (with_texts(tokenizer="words"), 64, "tokenizer 'words': expected bytes"),
    "no parent": (with_texts(out=Path("no/out")), 64, "no does not exist"),
    "out is a file": (with_texts(out=Path("in/a")), 64, "in/a is a file"),
    "out not empty": (out_with({"x": b"precious"}), 64, "not empty and not a corpus"),
    "out is damaged": (out_with({"corpus.json": b"{}"}), 64, "already holds another corpus"),
    "out is another": (another_corpus, 64, "already holds another corpus"),
}


@pytest.mark.core
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    prepare, code, message = BAD[name]
    arguments = {"sources": [tmp_path / "in"], "out": tmp_path / "out", **prepare(tmp_path)}
    before = sorted(tmp_path.rglob("*"))
    kept = content(tmp_path / "out") if (tmp_path / "out").is_dir() else {}
    with pytest.raises(JaxrelError, match=message) as refused:
        build(arguments.pop("sources"), arguments.pop("out"), **arguments)
    assert refused.value.code == code
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert not kept or content(tmp_path / "out") == kept


def test_a_full_disk_is_said_and_leaves_nothing(texts: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(FailedError, match="File too large"):
            build([texts], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_build_leaves_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object) -> None:
        assert list(tmp_path.glob(".out.*.building/corpus/train.array_record"))
        raise KeyboardInterrupt

    monkeypatch.setattr(module.SplitWriter, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build([texts], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changes_during_the_build_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    files, _ = find([tmp_path])
    (tmp_path / "a").write_text("after!")
    with pytest.raises(DataRefusedError, match="a: changed"):
        files[0].read()


def test_the_same_corpus_again_is_left_alone_even_inside_its_source(
    tmp_path: Path, write_texts: Callable
) -> None:
    write_texts(tmp_path, files=6, words=20)
    (tmp_path / "out").mkdir()  # empty: may be filled
    first = build([tmp_path], tmp_path / "out")
    assert first.created
    stamps = {p: p.stat().st_mtime_ns for p in first.path.iterdir()}
    again = build([tmp_path], tmp_path / "out")
    assert not again.created and again.corpus == first.corpus
    assert {p: p.stat().st_mtime_ns for p in first.path.iterdir()} == stamps
    assert not list(tmp_path.glob(".*"))


def test_others_may_read_the_corpus(corpus: Path) -> None:
    umask = os.umask(0o022)
    os.umask(umask)
    assert corpus.stat().st_mode & 0o777 == 0o777 & ~umask


def test_standard_library_is_built_once_without_tests(tmp_path: Path) -> None:
    folder = standard_library_corpus(tmp_path / "cache")
    corpus = read_corpus(folder)
    assert corpus.splits["train"].tokens > 5_000_000
    assert 0.01 < corpus.splits["held_out"].files / corpus.splits["train"].files < 0.15
    files, _ = find([Path(sysconfig.get_path("stdlib"))], keep=module._in_standard_library)
    names = {f.path.relative_to(sysconfig.get_path("stdlib")) for f in files}
    assert {Path("argparse.py"), Path("json/decoder.py")} <= names
    assert {name.suffix for name in names} == {".py"}
    folders = {part for name in names for part in name.parts[:-1]}
    assert not folders & {"test", "tests", "site-packages", "idlelib", "__pycache__"}
    stamp = (folder / "corpus.json").stat().st_mtime_ns
    assert standard_library_corpus(tmp_path / "cache") == folder
    assert (folder / "corpus.json").stat().st_mtime_ns == stamp


RACE = """
import sys
from jaxrel.data import corpus
rename = corpus._rename
def meet(built, out):  # both have built, neither has renamed
    print("built", flush=True); sys.stdin.readline(); return rename(built, out)
corpus._rename = meet
corpus._in_standard_library = lambda path: path.parts[0] == "json" and path.suffix == ".py"
print(corpus.standard_library_corpus(sys.argv[1]))
"""


def test_two_processes_may_build_the_cache_at_once(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, tmp_path / "cache"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout and racer.stdout.readline() == "built\n"
    said = {racer.communicate("go\n")[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    (folder,) = (tmp_path / "cache").iterdir()
    assert said == {f"{folder}\n"}
    assert json.loads((folder / "corpus.json").read_text())["splits"]["train"]["files"] > 1


def test_an_unwritable_cache_or_a_missing_library_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write the cache .*file.* set XDG_CACHE_HOME"):
        standard_library_corpus(tmp_path / "file")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(DataRefusedError, match="no library source"):
        standard_library_corpus(tmp_path / "cache")
