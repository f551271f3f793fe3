import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxrel.data.corpus import build
from jaxrel.data.store import CHUNK, TokenStream, read_corpus, token_dtype
from jaxrel.exit_codes import DataRefusedError


def test_any_run_of_tokens_is_a_slice_of_the_stream(corpus: Path) -> None:
    tokens = TokenStream(corpus, "train")
    total, chunk = tokens.split.tokens, tokens.corpus.chunk
    whole = tokens.read(0, total)
    assert whole.dtype == np.int32 and whole.shape == (total,)
    for start, count in [
        *((0, 1), (chunk - 1, 1), (chunk - 1, 2), (chunk, chunk), (5, 2 * chunk + 1)),
        (total - 3, 3),
    ]:
        np.testing.assert_array_equal(tokens.read(start, count), whole[start : start + count])


def test_a_stream_may_end_where_a_record_does(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x" * (2 * CHUNK - 1))
    info = build([tmp_path / "a"], tmp_path / "corpus", held_out=0)
    assert info.corpus.splits["train"].records == 2
    last = TokenStream(info.path, "train").read(CHUNK, CHUNK)
    assert bytes(last.astype("u1")) == b"x" * (CHUNK - 1) + b"\0"


@pytest.mark.parametrize(
    ("vocabulary", "name"),
    [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_dtype_follows_the_vocabulary(vocabulary: int, name: str) -> None:
    assert token_dtype(vocabulary).name == name
    assert token_dtype(vocabulary) == np.dtype(name).newbyteorder("<")


@pytest.mark.core
def test_no_flipped_bit_is_read_as_text(corpus: Path, tmp_path: Path) -> None:
    tokens = TokenStream(corpus, "train")
    whole = tokens.read(0, tokens.split.tokens)
    data = (corpus / "train.array_record").read_bytes()
    shutil.copytree(corpus, tmp_path / "c")
    start = data.index(whole[:100].astype("u1").tobytes())
    rng = np.random.default_rng(0)
    for bit in rng.integers(8 * start, 8 * (start + len(whole)), 40):
        with pytest.raises(DataRefusedError, match=r"train\.array_record.*cannot be read: Corrupt"):
            read_flipped(tmp_path / "c", data, bit)
    for bit in rng.integers(0, 8 * len(data), 40):  # indices, headers, padding
        try:
            read = read_flipped(tmp_path / "c", data, bit)
        except DataRefusedError:
            continue
        np.testing.assert_array_equal(read, whole)


def read_flipped(folder: Path, data: bytes, bit: int) -> np.ndarray:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << (bit % 8)
    (folder / "train.array_record").write_bytes(damaged)
    tokens = TokenStream(folder, "train")
    return tokens.read(0, tokens.split.tokens)


@pytest.mark.parametrize(
    "damage",
    [
        "not json",
        "[]",
        "{}",
        {"version": 2},
        {"format": "other"},
        {"dtype": "object"},
        {"dtype": "uint16"},
        {"chunk": 0},
        {"chunk": "8192"},
        {"splits": {}},
        {"unknown": 1},
    ],
)
def test_damaged_metadata_is_refused(corpus: Path, tmp_path: Path, damage: str | dict) -> None:
    right = (corpus / "corpus.json").read_text()
    wrong = damage if isinstance(damage, str) else json.dumps({**json.loads(right), **damage})
    (tmp_path / "corpus.json").write_text(wrong)
    with pytest.raises(DataRefusedError, match=r"corpus\.json"):
        read_corpus(tmp_path)


def test_files_that_do_not_fit_the_metadata_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataRefusedError, match="is not a corpus .*jaxrel data build"):
        TokenStream(tmp_path, "train")
    shutil.copytree(corpus, tmp_path / "c")
    file = tmp_path / "c" / "train.array_record"
    shutil.copy(corpus / "held_out.array_record", file)
    with pytest.raises(DataRefusedError, match=r"records, corpus\.json says"):
        TokenStream(tmp_path / "c", "train")
    for data in (b"", file.read_bytes()[: file.stat().st_size // 2]):
        file.write_bytes(data)
        with pytest.raises(DataRefusedError, match="damaged or missing"):
            TokenStream(tmp_path / "c", "train")
    file.unlink()
    with pytest.raises(DataRefusedError, match="damaged or missing"):
        TokenStream(tmp_path / "c", "train")
