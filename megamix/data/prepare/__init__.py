"""The way from text to token files, once, before training. It imports the rest of `data`. Begin with `prepare_corpus`.

prepare_corpus    calls the others, in this order
corpus            the files of a corpus
plan              pieces of work, into which the corpus is cut
split             which documents validate
compressed        files as they are uncompressed
faults            files of which nothing can be read
lost              the account of what is left out
records           the records that every reader yields, and the reader of text files
json_records      readers of JSON and of its lines
tables            readers of Parquet and Arrow files
tokenizer_choice  the tokenizer: trained here, the user's own, or bytes
pieces            the encoding of pieces, and their joining to token files
workers           processes that encode and train the tokenizer
"""

MANIFEST_NAME = "manifest.json"
