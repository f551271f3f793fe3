"""Tokenizers by name: bytes, or one that an installed library provides.

`bytes` gives each byte as a token. `tiktoken:NAME`, `sentencepiece:PATH` (a model file) and
`tokenizers:PATH` (a tokenizer.json) use the library of that name.
"""

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrel.exit_codes import UsageError

# What the end of a document is called in the vocabularies of common tokenizer.json files.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class Tokenizer:
    """Turns a document into token ids."""

    name: str
    """As given; a path is replaced by the file's name and a digest of its content."""
    vocabulary: int
    """One more than the largest id that `encode` can give."""
    separator: int
    """The id that follows every document."""
    encode: Callable[[bytes], np.ndarray]
    """UTF-8 text without NUL bytes to ids, integers [tokens]; adds no special tokens."""


def load(name: str) -> Tokenizer:
    """The tokenizer of that name; UsageError says what is missing or wrong."""
    if name == "bytes":
        # Files with NUL bytes are no text, so byte 0 can only be the end of a document.
        return Tokenizer("bytes", 256, 0, lambda text: np.frombuffer(text, np.uint8))
    library, _, which = name.partition(":")
    if library not in _LIBRARIES or not which:
        raise UsageError(
            f"tokenizer {name!r}: expected bytes, tiktoken:NAME, sentencepiece:PATH or "
            "tokenizers:PATH"
        )
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise UsageError(
            f"tokenizer {name!r} needs the package {library}: pip install {library}"
        ) from error
    try:
        return _LIBRARIES[library](module, which)
    except UsageError:
        raise
    except Exception as error:  # each library has exceptions of its own, some plain Exception
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"tokenizer {name!r} cannot be loaded: {reason}") from error


def _tiktoken(module: Any, name: str) -> Tokenizer:
    encoding = module.get_encoding(name)
    return Tokenizer(
        f"tiktoken:{name}",
        encoding.max_token_value + 1,
        encoding.eot_token,
        lambda text: np.asarray(encoding.encode_ordinary(text.decode()), np.int64),
    )


def _sentencepiece(module: Any, path: str) -> Tokenizer:
    name = _name_of_file("sentencepiece", path)
    model = module.SentencePieceProcessor(model_file=path)
    if model.eos_id() < 0:
        raise UsageError(f"tokenizer {path}: the model has no end-of-sentence id to part documents")
    return Tokenizer(
        name,
        model.get_piece_size(),
        model.eos_id(),
        lambda text: np.asarray(model.encode(text.decode()), np.int64),
    )


def _tokenizers(module: Any, path: str) -> Tokenizer:
    name = _name_of_file("tokenizers", path)
    model = module.Tokenizer.from_file(path)
    # The file may ask for documents to be cut or filled up, which would change the text, and
    # text that spells a special token must not become one.
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True
    ids = model.get_vocab(with_added_tokens=True)
    separator = next((ids[token] for token in _END_TOKENS if token in ids), None)
    if separator is None:
        raise UsageError(
            f"tokenizer {path}: no token to part documents, looked for {' '.join(_END_TOKENS)}"
        )
    return Tokenizer(
        name,
        max(ids.values()) + 1,
        separator,
        lambda text: np.asarray(
            model.encode(text.decode(), add_special_tokens=False).ids, np.int64
        ),
    )


def _name_of_file(library: str, path: str) -> str:
    """A name that is the same wherever the file lies, and another for another content."""
    digest = hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    return f"{library}:{Path(path).name}#{digest}"


_LIBRARIES = {
    "tiktoken": _tiktoken,
    "sentencepiece": _sentencepiece,
    "tokenizers": _tokenizers,
}
