"""Models in and out: Hugging Face folders, and text and perplexity from any model that lies on the disk.

links            which format a model has, and which part of which of their tensors a parameter is
place            a model's folder by a path, and its JSON
hugging_face     a Hugging Face folder, read tensor by tensor, and its sizes against those of its config.json
tokenizer_files  what belongs to a tokenizer, and which tokens end a text
convert          a Hugging Face folder becomes a checkpoint that a run can begin from, a model a Hugging Face folder
source           a model by its path: a run, a checkpoint, a Hugging Face folder; weights that are NaN or inf
evaluate         perplexity of a token file, and lm-eval-harness on the export
command          what `megamix import`, `export`, `generate` and `evaluate` take and print
"""
