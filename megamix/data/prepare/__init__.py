"""Text to token files; runs once, ahead of training.

`corpus` finds text, `readers` read its kinds, `plan` cuts it into pieces, `tokenizer_choice` makes or takes a
tokenizer, `piece` and `workers` encode by it, `merge` joins the pieces to token files; `prepare_corpus` calls them in
this order, and `progress` shows how far they are.
"""
