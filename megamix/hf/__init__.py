"""Models in and out: Hugging Face folders, and text and perplexity from any model on the disk. It imports `train` and
below. Begin with `convert`.

links            the format of a model, and the place of each parameter in a Hugging Face tensor
place            a model's folder by a path, and its JSON
folder           a Hugging Face folder, read tensor by tensor; its tensors' sizes are compared with its config.json
tokenizer_files  the files of a tokenizer, and the tokens that end a text
convert          import: a Hugging Face folder becomes a checkpoint to begin from; export: a model becomes such a folder
source           a model by its path: a run, a checkpoint, a Hugging Face folder; weights that are NaN or inf
average          the mean of several checkpoints of one model
evaluate         perplexity of a token file, and lm-eval-harness on the export
"""
