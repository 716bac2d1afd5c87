"""Text to tokens to batches.

`prepare` runs once and writes files: `corpus` finds text, `readers` read its kinds, `plan` cuts it into pieces, `piece`
and `workers` encode them by a `tokenizer`, `merge` joins them to a `token_file`. Training opens that with `TokenFile`,
orders windows with `sampler`, cuts them in `source` and fetches them ahead of need in `loader`. `synthetic` stands in
for files in tests.
"""
