"""A byte-level BPE of a tokenizer.json, run by tiktoken: the same ids, several times faster.

tiktoken has a pattern that splits text into words, and one order of merges, which is the order of the ids. A
tokenizer.json can express more than that; for such a file `BulkEncoder.of` returns None.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# The pattern of ByteLevel in `tokenizers`, src/pre_tokenizers/byte_level.rs; it comes from OpenAI's GPT-2 encoder.py.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for. A byte that is printable in Latin-1 is
    its own character; other bytes get the characters from 256 on (bytes_to_unicode of GPT-2's encoder.py).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class BulkEncoder:
    """Encodes text as the tokenizer.json from which it was made; special tokens in a text are plain characters."""

    def __init__(self, pattern: str, ranks: dict[bytes, int], words: dict[str, int], normalize: Any) -> None:
        import tiktoken

        self._encoding = tiktoken.Encoding("megamix", pat_str=pattern, mergeable_ranks=ranks, special_tokens=words)
        self._words = set(words)  # added tokens that are not special: each is one token wherever a text has it
        self._normalize = normalize

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any]) -> "BulkEncoder | None":
        """Make an encoder from the content of a tokenizer.json. Return None if tiktoken cannot express it, or is not
        installed.
        """
        pattern, ranks = _pattern(tokenizer["pre_tokenizer"]), _ranks(tokenizer)
        words = _words(tokenizer["added_tokens"])
        normalizer = tokenizer["normalizer"]
        if pattern is None or ranks is None or words is None or normalizer not in (None, {"type": "NFC"}):
            return None
        try:
            return cls(pattern, ranks, words, _nfc() if normalizer else None)
        except (ImportError, ValueError):  # ValueError: tiktoken's regular expressions lack the pattern
            return None

    def encode(self, text: str) -> list[int] | None:
        """Return token ids; None for a text on which tiktoken fails. Its regular expressions overflow their stack at
        some hundred thousand white spaces in a row.
        """
        if self._normalize and not text.isascii():
            text = self._normalize(text)
        try:
            if self._words:
                return self._encoding.encode(text, allowed_special=self._words, disallowed_special=())
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's; the class cannot be imported
                raise
            return None


def _nfc() -> Any:
    """Return the NFC function of `tokenizers`, which a tokenizer.json would use. Python's tables may have another
    version of Unicode.
    """
    from tokenizers.normalizers import NFC

    return NFC().normalize_str


def _pattern(pre_tokenizer: Any) -> str | None:
    """Return the regular expression whose matches are the words; None if tiktoken cannot express it."""
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
    """Return the id of each token's bytes; None unless a smaller id always means an earlier merge."""
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
    """Return the ids of the added tokens that are not special; None if one has matching rules of its own."""
    words = [token for token in added_tokens if not token["special"]]
    names = [token["content"] for token in words]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in words):
        return None
    if any(name != other and name.startswith(other) for name in names for other in names):
        return None  # if one begins with another, each library has another rule which of the two it takes
    return {token["content"]: token["id"] for token in words}
