import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxrel.data.corpus import build
from jaxrel.data.store import TokenStream
from jaxrel.data.tokenizer import load
from jaxrel.exit_codes import UsageError

TEXT = "the group and the order of file \u2713\n"
WORDS = "of and the step shard group batch token window epoch seed order file text".split()
LINES = [f"{a} {b} {c} ." for a in WORDS for b in WORDS for c in WORDS[:4]]


def test_bytes_are_the_text_itself() -> None:
    tokenizer = load("bytes")
    assert (tokenizer.vocabulary, tokenizer.separator) == (256, 0)
    assert bytes(tokenizer.encode(TEXT.encode())) == TEXT.encode()


@pytest.mark.parametrize("name", ["", "words", "tiktoken", "tiktoken:", "os:path", "bytes:x"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="expected bytes, tiktoken:NAME, sentencepiece:PATH"):
        load(name)


@pytest.mark.parametrize("library", ["tiktoken", "sentencepiece", "tokenizers"])
def test_an_absent_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"needs the package {library}: pip install {library}"):
        load(f"{library}:x")


def train_tokenizers(path: Path, special: str = "<|endoftext|>") -> None:
    library = pytest.importorskip("tokenizers")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[special],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(LINES, trainer)
    model.enable_truncation(3)  # as files in the wild have it
    model.enable_padding(length=50)
    model.save(str(path))


def train_sentencepiece(path: Path, **options: object) -> None:
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())


def test_tokenizers_file_neither_cuts_text_nor_reads_specials(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    path = tmp_path / "tok.json"
    train_tokenizers(path)
    tokenizer = load(f"tokenizers:{path}")
    decode = library.Tokenizer.from_file(str(path)).decode
    for text in (TEXT, "a <|endoftext|> in the text", TEXT * 40):
        ids = tokenizer.encode(text.encode())
        assert decode(ids.tolist(), skip_special_tokens=False) == text
        assert tokenizer.separator not in ids and ids.max() < tokenizer.vocabulary
    assert len(tokenizer.encode(TEXT.encode())) < len(TEXT.encode())


def test_sentencepiece_model(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    path = tmp_path / "m.model"
    train_sentencepiece(path)
    tokenizer = load(f"sentencepiece:{path}")
    ids = tokenizer.encode(TEXT.encode())
    model = library.SentencePieceProcessor(model_file=str(path))
    assert model.decode(ids.tolist()).strip() == TEXT.strip()
    assert tokenizer.vocabulary == model.get_piece_size()
    assert tokenizer.separator == model.eos_id() and tokenizer.separator not in ids


def test_tiktoken_encoding_from_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("tiktoken.registry")

    def bytes_and_the() -> dict:
        ranks = {bytes([b]): b for b in range(256)} | {b"th": 256, b"the": 257}
        special = {"<|endoftext|>": 300}
        return {
            "name": "mine",
            "pat_str": r"\S+|\s+",
            "mergeable_ranks": ranks,
            "special_tokens": special,
        }

    monkeypatch.setattr(registry, "ENCODING_CONSTRUCTORS", {"mine": bytes_and_the})
    monkeypatch.setattr(registry, "ENCODINGS", {})
    tokenizer = load("tiktoken:mine")
    assert (tokenizer.vocabulary, tokenizer.separator) == (301, 300)
    assert tokenizer.encode(b"the <|endoftext|>").tolist() == [257, *b" <|endoftext|>"]
    with pytest.raises(UsageError, match="'tiktoken:other' cannot be loaded"):
        load("tiktoken:other")


def test_a_corpus_of_wider_tokens_is_the_tokenized_text(
    tmp_path: Path, write_texts: Callable
) -> None:
    train_sentencepiece(tmp_path / "m.model")
    name = f"sentencepiece:{tmp_path / 'm.model'}"
    tokenizer = load(name)
    texts = write_texts(tmp_path / "texts", files=9, words=2000)
    info = build([tmp_path / "texts"], tmp_path / "corpus", tokenizer=name, held_out=0)
    assert info.corpus.dtype == "uint16" and info.corpus.splits["train"].records > 1
    stream = TokenStream(info.path, "train")
    expected = [
        np.append(tokenizer.encode(text), tokenizer.separator) for _, text in sorted(texts.items())
    ]
    np.testing.assert_array_equal(stream.read(0, stream.split.tokens), np.concatenate(expected))
    assert str(tmp_path) not in (info.path / "corpus.json").read_text()


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text(json.dumps({"model": None}))
    for library in ("tokenizers", "sentencepiece"):
        pytest.importorskip(library)
        for path in (tmp_path / "none", tmp_path, tmp_path / "bad"):
            with pytest.raises(UsageError, match="cannot be loaded") as refused:
                load(f"{library}:{path}")
            assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    train_tokenizers(tmp_path / "tok.json", special="<unusual>")
    with pytest.raises(UsageError, match="no token to part documents"):
        load(f"tokenizers:{tmp_path / 'tok.json'}")
    train_sentencepiece(tmp_path / "m.model", eos_id=-1)
    with pytest.raises(UsageError, match="no end-of-sentence"):
        load(f"sentencepiece:{tmp_path / 'm.model'}")
