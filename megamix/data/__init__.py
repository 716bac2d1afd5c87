"""Text to tokens to batches.

`prepare` runs once: by a `tokenizer` (and its kin), it writes a `token_file` with its `token_index`. Training opens
that: `source` cuts its windows in the order of `sampler`, which mixes sources, too; `loader` fetches batches ahead of
need. `steady_file` tells a file that changes while it is read.
"""
