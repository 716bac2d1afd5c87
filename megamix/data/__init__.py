"""Text to tokens to batches.

`prepare` runs once: by a `tokenizer` (and its kin), it writes a `token_file` with its `token_index`. Training opens
that: `source` cuts its windows in the order of `sampler`, `blend` mixes sources, `loader` fetches batches ahead of
need, `fingerprint` knows the data again. `synthetic` makes tokens up.
"""
