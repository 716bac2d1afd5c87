"""Text to tokens to batches: corpus, tokenizer, token_file, prepare; then sampler, source, loader.

`prepare` runs once and writes files; training opens them with `TokenFile`, orders windows with `sampler`, cuts
them in `source` and fetches them ahead of need in `loader`. `synthetic` stands in for files in tests.
"""
