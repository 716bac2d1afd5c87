"""The way from text to token files. It runs once, before training.

`prepare_corpus` calls the others, in this order. `corpus` finds text, and `plan` cuts it into pieces. `records`,
`json_records` and `tables` read the kinds of files. `tokenizer_choice` trains a tokenizer or takes one. `pieces` and
`workers` encode the pieces and join them to token files.
"""

MANIFEST_NAME = "manifest.json"
