"""Text to tokens to batches.

`prepare` runs once and writes files: `corpus` finds text, `readers` read its kinds, `plan` cuts it into pieces,
`prepare_tokenizer` makes or takes a `tokenizer`, `piece` and `workers` encode by it, `merge` joins the pieces to a
`token_file` with its `token_index`. Training opens that: `source` cuts its windows in the order of `sampler`, `blend`
mixes sources, `loader` fetches batches ahead of need, `fingerprint` knows the data again. `synthetic` makes tokens up;
`durable` and `progress` serve the writers.
"""
