"""A byte-level BPE of a tokenizer.json, run by tiktoken: the same ids, several times faster.

tiktoken knows a pattern that splits text into words, and one order of merges, which is the order of the ids. A
tokenizer.json can say more than that; `BulkEncoder.of` gives None for one that does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# What `tokenizers` does for ByteLevel, in src/pre_tokenizers/byte_level.rs; first in OpenAI's GPT-2 encoder.py.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for: itself where it can be printed in
    Latin-1, else the next free character from 256 on (bytes_to_unicode of GPT-2's encoder.py).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class BulkEncoder:
    """Encodes as the tokenizer.json it was made from would, special tokens as plain characters."""

    def __init__(self, pattern: str, ranks: dict[bytes, int], words: dict[str, int], normalize: Any) -> None:
        import tiktoken

        self._encoding = tiktoken.Encoding("megamix", pat_str=pattern, mergeable_ranks=ranks, special_tokens=words)
        self._words = set(words)  # added tokens that are no special ones: they stand for themselves in any text
        self._normalize = normalize

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any]) -> "BulkEncoder | None":
        """Make one from the content of a tokenizer.json; None if tiktoken cannot express it, or is not installed."""
        pattern, ranks = _pattern(tokenizer["pre_tokenizer"]), _ranks(tokenizer)
        words = _words(tokenizer["added_tokens"])
        normalizer = tokenizer["normalizer"]
        if pattern is None or ranks is None or words is None or normalizer not in (None, {"type": "NFC"}):
            return None
        try:
            return cls(pattern, ranks, words, _nfc() if normalizer else None)
        except (ImportError, ValueError):  # ValueError: a pattern that tiktoken's regular expressions do not know
            return None

    def encode(self, text: str) -> list[int] | None:
        """Return token ids. None for a text that tiktoken breaks down on: its regular expressions overflow their stack
        at some hundred thousand white spaces in a row.
        """
        if self._normalize and not text.isascii():
            text = self._normalize(text)
        try:
            if self._words:
                return self._encoding.encode(text, allowed_special=self._words, disallowed_special=())
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust; the class has no name that can be imported
                raise
            return None


def _nfc() -> Any:
    """Of the same library that would have done it: Python's own tables may be of another version of Unicode."""
    from tokenizers.normalizers import NFC

    return NFC().normalize_str


def _pattern(pre_tokenizer: Any) -> str | None:
    """The regular expression whose matches are the words."""
    split, byte_level = None, pre_tokenizer
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence" and len(pre_tokenizer["pretokenizers"]) == 2:
        split, byte_level = pre_tokenizer["pretokenizers"]
    if not byte_level or byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"]:
        return None
    own_pattern = byte_level.get("use_regex", True)
    if split is None:
        return _GPT2_PATTERN if own_pattern else None
    isolated = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    return split["pattern"].get("Regex") if isolated and not own_pattern else None


def _ranks(tokenizer: Mapping[str, Any]) -> dict[bytes, int] | None:
    """The id of each token's bytes, if a smaller id always means an earlier merge."""
    model = tokenizer["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model.get(key) for key in odd):
        return None
    added = {token["id"] for token in tokenizer["added_tokens"]}
    vocab = {token: token_id for token, token_id in model["vocab"].items() if token_id not in added}
    merged = ["".join(merge if isinstance(merge, list) else merge.split(" ")) for merge in model["merges"]]
    order = [vocab.get(token, -1) for token in merged]
    alphabet = byte_alphabet()
    if (
        order != sorted(order)
        or -1 in order
        or not alphabet.keys() <= vocab.keys()
        or (not model.get("ignore_merges") and vocab.keys() - alphabet.keys() != set(merged))
        or any(character not in alphabet for token in vocab for character in token)
    ):
        return None
    return {bytes(alphabet[character] for character in token): token_id for token, token_id in vocab.items()}


def _words(added_tokens: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Added tokens that are found in any text, with their ids; None if they are found in a way of their own."""
    words = [token for token in added_tokens if not token["special"]]
    names = [token["content"] for token in words]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in words):
        return None
    if any(name != other and name.startswith(other) for name in names for other in names):
        return None  # which of two is taken is another rule in each library
    return {token["content"]: token["id"] for token in words}
