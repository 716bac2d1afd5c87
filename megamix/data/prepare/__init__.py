"""Text to token files; runs once, ahead of training.

`corpus` finds text, `plan` cuts it into pieces, `records`, `json_records` and `tables` read its kinds of file,
`tokenizer_choice` makes or takes a tokenizer, `pieces` and `workers` encode by it and join the pieces to token files;
`prepare_corpus` calls them in this order.
"""

MANIFEST_NAME = "manifest.json"
