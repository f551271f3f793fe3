"""A corpus on disk: a stream of tokens for each split, in records of equal length.

    CORPUS/ corpus.json  train.array_record  held_out.array_record

Every record but the last of a split holds `chunk` tokens, little-endian, in the smallest
unsigned dtype that holds the vocabulary; so any run of tokens is found without an index.
ArrayRecord keeps a hash of each record and refuses one that is damaged.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from jaxrel.exit_codes import DataRefusedError, FailedError

FORMAT = "jaxrel-corpus"
VERSION = 1
CHUNK = 8192
METADATA = "corpus.json"
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Split:
    """What one split holds."""

    tokens: int
    records: int
    files: int
    content_hash: str
    """BLAKE2b over the whole stream of tokens as stored, 32 hex digits."""


@dataclass(frozen=True)
class Corpus:
    """The content of corpus.json; the same text and tokenizer give the same content."""

    tokenizer: str
    vocabulary: int
    """Token ids are below it."""
    separator: int
    """The token after every document."""
    dtype: str
    """uint8, uint16 or uint32; stored little-endian."""
    chunk: int
    """Tokens a record."""
    splits: dict[str, Split]
    """train and held_out; held_out has no tokens when none was asked for."""

    def write(self, folder: Path) -> None:
        """Write corpus.json into `folder`."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        (folder / METADATA).write_text(json.dumps(content, indent=1) + "\n")


def is_corpus(folder: Path) -> bool:
    """Whether `folder` says that it is a corpus of ours."""
    return (folder / METADATA).is_file()


def read_corpus(folder: Path) -> Corpus:
    """What corpus.json says; DataRefusedError when it is not one that can be read."""
    path = folder / METADATA
    try:
        content = json.loads(path.read_text())
        if (content.pop("format"), content.pop("version")) != (FORMAT, VERSION):
            raise DataRefusedError(f"{path}: this is not {FORMAT} version {VERSION}")
        splits = {name: Split(**content["splits"][name]) for name in SPLITS}
        corpus = Corpus(**{**content, "splits": splits})
        whole = all(s.records == -(-s.tokens // corpus.chunk) for s in splits.values())
        if not whole or corpus.dtype != token_dtype(corpus.vocabulary).name:
            raise ValueError("its numbers contradict each other")
    except OSError as error:
        raise DataRefusedError(
            f"{folder} is not a corpus ({METADATA}: {error.strerror}); make one with "
            "`jaxrel data build`"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise DataRefusedError(f"{path} is damaged: {error!r}") from error
    return corpus


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest little-endian unsigned dtype for ids below `vocabulary`."""
    for name in ("<u1", "<u2", "<u4"):
        if vocabulary <= 2 ** (8 * np.dtype(name).itemsize):
            return np.dtype(name)
    raise DataRefusedError(f"a vocabulary of {vocabulary} does not fit into 32 bits")


class SplitWriter:
    """Writes one split's stream of tokens, record by record."""

    def __init__(self, path: Path, vocabulary: int) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._dtype = token_dtype(vocabulary)
        self._writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        self._hash = hashlib.blake2b(digest_size=16)
        self._rest = b""
        self._tokens = self._records = self._files = 0

    def add(self, tokens: np.ndarray, separator: int) -> None:
        """Append one document, integers [tokens], and the separator."""
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            raise DataRefusedError(
                f"the tokenizer gave id {tokens.max()}, outside its vocabulary of "
                f"{self._vocabulary}"
            )
        data = tokens.astype(self._dtype).tobytes() + self._dtype.type(separator).tobytes()
        self._hash.update(data)
        self._tokens += len(tokens) + 1
        self._files += 1
        data = self._rest + data
        record = CHUNK * self._dtype.itemsize
        whole = len(data) - len(data) % record
        for start in range(0, whole, record):
            self._write(data[start : start + record])
        self._rest = data[whole:]

    def close(self) -> Split:
        """Finish the file and read back how many records it has."""
        if self._rest:
            self._write(self._rest)
        try:
            self._writer.close()
            written = len(ArrayRecordDataSource(str(self._path)))
        except RuntimeError as error:
            raise FailedError(f"cannot write {self._path}: {error}") from error
        if written != self._records:
            raise FailedError(f"{self._path}: wrote {self._records} records, found {written}")
        return Split(self._tokens, self._records, self._files, self._hash.hexdigest())

    def _write(self, record: bytes) -> None:
        try:
            self._writer.write(record)
        except RuntimeError as error:
            raise FailedError(f"cannot write {self._path}: {error}") from error
        self._records += 1


class TokenStream:
    """Random access to the tokens of one split."""

    def __init__(self, folder: Path, split: str) -> None:
        """Raises DataRefusedError when the files are not what corpus.json says."""
        self.folder = folder
        self.corpus = read_corpus(folder)
        self.split = self.corpus.splits[split]
        self._path = folder / f"{split}.array_record"
        self._dtype = np.dtype(self.corpus.dtype).newbyteorder("<")
        if not self.split.records:
            raise DataRefusedError(f"{folder} has no {split} split; build one with held_out > 0")
        try:
            self._source = ArrayRecordDataSource(str(self._path))
        except RuntimeError as error:
            raise DataRefusedError(f"{self._path} is damaged or missing: {error}") from error
        if len(self._source) != self.split.records:
            raise DataRefusedError(
                f"{self._path} has {len(self._source)} records, {METADATA} says "
                f"{self.split.records}"
            )

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start to start + count - 1: int32 [count]."""
        first, last = start // self.corpus.chunk, (start + count - 1) // self.corpus.chunk
        data = b"".join(self._record(i) for i in range(first, last + 1))
        tokens = np.frombuffer(data, self._dtype)
        begin = start - first * self.corpus.chunk
        return tokens[begin : begin + count].astype(np.int32)

    def _record(self, index: int) -> bytes:
        try:
            return self._source[index]
        except RuntimeError as error:
            damaged = "orrupt" in str(error) or "nvalid" in str(error)
            kind = DataRefusedError if damaged else FailedError
            raise kind(f"{self._path}: record {index} cannot be read: {error}") from error
