"""A byte-level BPE of a tokenizer.json, run by tiktoken: the same ids, several times faster.

tiktoken has a pattern that splits text into words, and one order of merges, which is the order of the ids. A
tokenizer.json can express more than that; for such a file `bulk_encoder` returns None.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


def bulk_encoder(tokenizer: Mapping[str, Any]) -> Callable[[str], list[int] | None] | None:
    """Return a function that encodes as a tokenizer.json with this content, special tokens in a text as plain
    characters; None if tiktoken cannot express it, or is not installed.

    It returns None for a text on which tiktoken fails. Its regular expressions overflow their stack at some hundred
    thousand white spaces in a row.
    """
    pattern, ranks = _pattern(tokenizer["pre_tokenizer"]), _ranks(tokenizer)
    words = _words(tokenizer["added_tokens"])
    normalizer = tokenizer["normalizer"]
    if pattern is None or ranks is None or words is None or normalizer not in (None, {"type": "NFC"}):
        return None
    try:
        import tiktoken

        encoding = tiktoken.Encoding("megamix", pat_str=pattern, mergeable_ranks=ranks, special_tokens=words)
    except (ImportError, ValueError):  # ValueError: tiktoken's regular expressions lack the pattern
        return None
    from tokenizers.normalizers import NFC  # Python's tables may have another version of Unicode

    normalize = NFC().normalize_str
    call = encoding.encode_ordinary
    if words:
        call = partial(encoding.encode, allowed_special=set(words), disallowed_special=())

    def encode(text: str) -> list[int] | None:
        try:
            ids: list[int] = call(normalize(text) if normalizer and not text.isascii() else text)
            return ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's; the class cannot be imported
                raise
            return None

    return encode


def _pattern(pre_tokenizer: Any) -> str | None:
    """Return the regular expression whose matches are the words; None if tiktoken cannot express it."""
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    match parts:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2_PATTERN
        case [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:
            is_plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
            return split["pattern"].get("Regex") if is_plain else None
    return None


def _ranks(tokenizer: Mapping[str, Any]) -> dict[bytes, int] | None:
    """Return the id of each token's bytes; None unless a smaller id always means an earlier merge."""
    model = tokenizer["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model.get(key) for key in odd):
        return None
    added = {token["id"] for token in tokenizer["added_tokens"]}
    vocab = {token: token_id for token, token_id in model["vocab"].items() if token_id not in added}
    merged = ["".join(merge) for merge in model["merges"]]
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
    plain = [token for token in added_tokens if not token["special"]]
    words = {token["content"]: token["id"] for token in plain}
    is_odd = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in plain)
    # If one word begins with another, each library has another rule which of the two it takes.
    if is_odd or any(name != other and name.startswith(other) for name in words for other in words):
        return None
    return words
